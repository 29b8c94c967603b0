//! The test bed itself: what the other tests stand on.

use std::time::Instant;

use testbed::{ControlPlane, Options};

#[tokio::test(flavor = "multi_thread")]
async fn bed() -> anyhow::Result<()> {
    let start = Instant::now();
    let plane = ControlPlane::start(Options::default()).await?;
    eprintln!("ready after {:?}", start.elapsed());
    eprintln!("{}", plane.kubectl_ok(&["version"]).await?);
    Ok(())
}
