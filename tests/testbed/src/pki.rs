//! A throwaway PKI: every control plane has its own, and nothing of it outlives the folder that it is in.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, Result, ensure};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::json;

/// The certificate authorities and the files of one control plane.
#[derive(Debug)]
pub struct Pki {
    folder: PathBuf,
    ca: Issuer<'static, KeyPair>,
    count: AtomicU32,
}

impl Pki {
    /// Makes both CAs and everything that the API server needs, as files in `folder`:
    /// `ca.crt`, `front-ca.crt`, `front.crt`, `front.key`, `apiserver.crt`, `apiserver.key`, `kubelet-client.crt`,
    /// `kubelet-client.key`, `sa.pub`, `sa.key`. The API server may be reached at loopback and at these addresses.
    ///
    /// # Errors
    /// If the files can't be written.
    pub fn create(folder: &Path, addresses: &[Ipv4Addr]) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let pki = Self {
            folder: folder.to_owned(),
            ca: authority(folder, "ca")?,
            count: AtomicU32::new(0),
        };
        // Aggregated APIs believe the user names in headers of whoever this second CA signed: clients must not be among them.
        issue(
            folder,
            "front",
            &authority(folder, "front-ca")?,
            &[],
            client("front-proxy-client", &[]),
        )?;
        let kubelet_client = client("kube-apiserver-kubelet-client", &["system:masters"]);
        issue(folder, "kubelet-client", &pki.ca, &[], kubelet_client)?;
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let mut hosts = vec![
            "127.0.0.1",
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
        ];
        hosts.extend(addresses.iter().map(String::as_str));
        issue(
            folder,
            "apiserver",
            &pki.ca,
            &hosts,
            Holder {
                user: "kube-apiserver".to_owned(),
                groups: Vec::new(),
                purpose: ExtendedKeyUsagePurpose::ServerAuth,
            },
        )?;
        let key = KeyPair::generate().context("making the key of the service accounts")?;
        write(&folder.join("sa.key"), &key.serialize_pem())?;
        write(&folder.join("sa.pub"), &key.public_key_pem())?;
        Ok(pki)
    }

    /// A file of this PKI.
    #[must_use]
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    /// A kubeconfig for any user in up to two groups, by a client certificate made for it.
    ///
    /// # Errors
    /// If there are more groups; if the files can't be written.
    pub fn user_kubeconfig(&self, server: &str, user: &str, groups: &[&str]) -> Result<PathBuf> {
        let name = self.file_name(user);
        issue(&self.folder, &name, &self.ca, &[], client(user, groups))?;
        let [certificate, key] = ["crt", "key"].map(|end| self.path(&format!("{name}.{end}")));
        self.kubeconfig(
            &name,
            server,
            "default",
            &json!({"client-certificate": certificate, "client-key": key}),
        )
    }

    /// A kubeconfig with a bearer token, for service accounts.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn token_kubeconfig(
        &self,
        server: &str,
        user: &str,
        namespace: &str,
        token: &str,
    ) -> Result<PathBuf> {
        self.kubeconfig(
            &self.file_name(user),
            server,
            namespace,
            &json!({"token": token}),
        )
    }

    /// JSON is YAML, so serde is all it takes.
    fn kubeconfig(
        &self,
        name: &str,
        server: &str,
        namespace: &str,
        user: &serde_json::Value,
    ) -> Result<PathBuf> {
        let path = self.path(&format!("{name}.kubeconfig"));
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "testbed",
            "clusters": [{"name": "testbed", "cluster": {"server": server, "certificate-authority": self.path("ca.crt")}}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": name, "namespace": namespace}}],
        });
        write(&path, &text.to_string())?;
        Ok(path)
    }

    /// User names hold `:` and `/`, and the same user may be asked for twice with other groups.
    fn file_name(&self, user: &str) -> String {
        let safe: String = user
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        format!("{safe}-{}", self.count.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a certificate says about its holder.
struct Holder {
    user: String,
    groups: Vec<String>,
    purpose: ExtendedKeyUsagePurpose,
}

fn client(user: &str, groups: &[&str]) -> Holder {
    let groups = groups.iter().map(|&group| group.to_owned()).collect();
    Holder {
        user: user.to_owned(),
        groups,
        purpose: ExtendedKeyUsagePurpose::ClientAuth,
    }
}

fn authority(folder: &Path, name: &str) -> Result<Issuer<'static, KeyPair>> {
    let key = KeyPair::generate().with_context(|| format!("making the key of {name}"))?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    let certificate = params
        .self_signed(&key)
        .with_context(|| format!("signing {name}"))?;
    write(&folder.join(format!("{name}.crt")), &certificate.pem())?;
    Ok(Issuer::new(params, key))
}

fn issue(
    folder: &Path,
    name: &str,
    ca: &Issuer<'static, KeyPair>,
    hosts: &[&str],
    holder: Holder,
) -> Result<()> {
    let hosts: Vec<String> = hosts.iter().map(|&host| host.to_owned()).collect();
    let mut params =
        CertificateParams::new(hosts).with_context(|| format!("naming the hosts of {name}"))?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, holder.user);
    // rcgen keeps one value for each attribute type, and takes the same type given by number for another one.
    let attributes = [
        DnType::OrganizationName,
        DnType::CustomDnType(vec![2, 5, 4, 10]),
    ];
    ensure!(
        holder.groups.len() <= attributes.len(),
        "{name}: a client certificate can have {} groups here",
        attributes.len()
    );
    for (attribute, group) in attributes.into_iter().zip(holder.groups) {
        params.distinguished_name.push(attribute, group);
    }
    params.extended_key_usages = vec![holder.purpose];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate().with_context(|| format!("making the key of {name}"))?;
    let certificate = params
        .signed_by(&key, ca)
        .with_context(|| format!("signing {name}"))?;
    write(&folder.join(format!("{name}.crt")), &certificate.pem())?;
    write(&folder.join(format!("{name}.key")), &key.serialize_pem())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
