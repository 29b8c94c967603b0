//! Issues and checks certificates. Pure but for the keys' randomness.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Datelike, TimeDelta, Utc};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    sign::CertifiedKey,
};

/// How long a CA is valid: 10 years.
const CA_VALID: TimeDelta = TimeDelta::days(3650);
/// How long a leaf is valid: a year.
const LEAF_VALID: TimeDelta = TimeDelta::days(365);
/// A bundle is issued anew when its leaf ends this soon, while everybody still accepts it.
const LOOK_AHEAD: TimeDelta = TimeDelta::days(30);

/// PEM texts as they stand in the Secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Bundle {
    /// One or more CA certificates; any of them may have issued the leaf.
    pub ca: String,
    /// Key of the first CA.
    pub ca_key: String,
    /// The leaf.
    pub cert: String,
    /// Its key.
    pub key: String,
}

/// What has to happen next.
#[derive(Debug)]
pub enum Step {
    /// Make a CA and a leaf, for this reason.
    Issue(String),
    /// Serve what there is.
    Serve(Served),
}

/// A certificate, ready to be served.
#[derive(Clone, Debug)]
pub struct Served {
    /// Chain and key.
    pub key: Arc<CertifiedKey>,
    /// The CAs that it verifies under.
    pub roots: Arc<RootCertStore>,
    /// When it ends, in Unix seconds.
    pub not_after_seconds: f64,
}

/// Why certificates could not be made or can't be served.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// They could not be made.
    #[error("certificates could not be issued")]
    Issue(#[from] rcgen::Error),
    /// A PEM text can't be read.
    #[error("{0} is no PEM")]
    Pem(&'static str, #[source] rustls::pki_types::pem::Error),
    /// The leaf does not verify.
    #[error("the certificate does not verify under the CA")]
    Verify(#[source] rustls::Error),
    /// The verifier can't be built from the CAs.
    #[error("the CA can't be used")]
    Roots(#[source] rustls::client::VerifierBuilderError),
    /// A name can't be in a certificate.
    #[error("{0:?} is no DNS name or address")]
    Name(String),
    /// The leaf has an unreadable date.
    #[error("the certificate's dates can't be read")]
    Dates,
}

/// Decides what to do with what the Secret holds.
#[must_use]
pub fn next(bundle: Option<&Bundle>, names: &[String], now: DateTime<Utc>) -> Step {
    let Some(bundle) = bundle else {
        return Step::Issue("there are none yet".to_owned());
    };
    match bundle.check(names, now + LOOK_AHEAD) {
        Ok(served) => Step::Serve(served),
        Err(error) => Step::Issue(crate::error::Chain(&error).to_string()),
    }
}

impl Bundle {
    /// A new CA and a leaf for `names`.
    ///
    /// # Errors
    /// When a name can't be in a certificate.
    pub fn issue(names: &[String], now: DateTime<Utc>) -> Result<Self, PkiError> {
        let ca_key = KeyPair::generate()?;
        let mut ca = CertificateParams::new(Vec::new())?;
        ca.distinguished_name
            .push(DnType::CommonName, "headstart-ca");
        ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        valid(&mut ca, now, CA_VALID);
        let ca_pem = ca.self_signed(&ca_key)?.pem();

        let key = KeyPair::generate()?;
        let mut leaf = CertificateParams::new(names)?;
        leaf.distinguished_name
            .push(DnType::CommonName, "headstart");
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        leaf.use_authority_key_identifier_extension = true;
        valid(&mut leaf, now, LEAF_VALID);
        let cert = leaf
            .signed_by(&key, &Issuer::from_params(&ca, &ca_key))?
            .pem();
        Ok(Self {
            ca: ca_pem,
            ca_key: ca_key.serialize_pem(),
            cert,
            key: key.serialize_pem(),
        })
    }

    /// Whether the leaf can be served for all `names` until `until`: key, chain, names and dates.
    ///
    /// # Errors
    /// Says which of them is wrong.
    pub fn check(&self, names: &[String], until: DateTime<Utc>) -> Result<Served, PkiError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(self.ca.as_bytes()) {
            roots
                .add(ca.map_err(|error| PkiError::Pem("ca.crt", error))?)
                .map_err(PkiError::Verify)?;
        }
        let roots = Arc::new(roots);
        let leaf = CertificateDer::from_pem_slice(self.cert.as_bytes())
            .map_err(|error| PkiError::Pem("tls.crt", error))?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(PkiError::Roots)?;
        let at = UnixTime::since_unix_epoch(Duration::from_secs(
            u64::try_from(until.timestamp()).unwrap_or(0),
        ));
        for name in names {
            let name =
                ServerName::try_from(name.clone()).map_err(|_| PkiError::Name(name.clone()))?;
            verifier
                .verify_server_cert(&leaf, &[], &name, &[], at)
                .map_err(PkiError::Verify)?;
        }
        let not_after_seconds = not_after(&leaf).ok_or(PkiError::Dates)?;
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes())
            .map_err(|error| PkiError::Pem("tls.key", error))?;
        let key =
            Arc::new(CertifiedKey::from_der(vec![leaf], key, &provider).map_err(PkiError::Verify)?);
        Ok(Served {
            key,
            roots,
            not_after_seconds,
        })
    }
}

fn valid(params: &mut CertificateParams, now: DateTime<Utc>, valid: TimeDelta) {
    // rcgen has dates of the `time` crate; whole days spare us a dependency. A day back bears clocks that are behind.
    let day = |at: DateTime<Utc>| {
        let part = |number: u32| u8::try_from(number).expect("months and days are small");
        rcgen::date_time_ymd(at.year(), part(at.month()), part(at.day()))
    };
    params.not_before = day(now - TimeDelta::days(1));
    params.not_after = day(now + valid);
}

#[expect(
    clippy::cast_precision_loss,
    reason = "seconds fit 52 bits for 140 million years"
)]
fn not_after(leaf: &CertificateDer<'_>) -> Option<f64> {
    let (_, leaf) = x509_parser::parse_x509_certificate(leaf).ok()?;
    Some(leaf.validity().not_after.timestamp() as f64)
}

/// Keys stay out of logs.
impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bundle")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        vec!["headstart.ns.svc".to_owned(), "127.0.0.1".to_owned()]
    }

    #[test]
    fn what_is_issued_is_served_until_it_ends() {
        let now = Utc::now();
        let bundle = Bundle::issue(&names(), now).expect("issues");
        assert!(matches!(next(Some(&bundle), &names(), now), Step::Serve(_)));
        assert!(matches!(
            next(Some(&bundle), &names(), now + TimeDelta::days(340)),
            Step::Issue(_)
        ));
        assert!(matches!(next(None, &names(), now), Step::Issue(_)));
        assert!(matches!(
            next(Some(&bundle), &["other".to_owned()], now),
            Step::Issue(_)
        ));
    }

    #[test]
    fn a_leaf_needs_its_key_and_one_of_the_cas() {
        let now = Utc::now();
        let (old, new) = (
            Bundle::issue(&names(), now).expect("issues"),
            Bundle::issue(&names(), now).expect("issues"),
        );
        let both = Bundle {
            ca: format!("{}{}", new.ca, old.ca),
            ..old.clone()
        };
        assert!(both.check(&names(), now).is_ok(), "two CAs overlap");
        assert!(
            Bundle {
                ca: new.ca.clone(),
                ..old.clone()
            }
            .check(&names(), now)
            .is_err(),
            "another CA"
        );
        assert!(
            Bundle {
                key: new.key.clone(),
                ..old.clone()
            }
            .check(&names(), now)
            .is_err(),
            "another key"
        );
        assert!(
            Bundle {
                cert: "x".into(),
                ..old
            }
            .check(&names(), now)
            .is_err(),
            "no PEM"
        );
    }
}
