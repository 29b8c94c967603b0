//! Whom the cluster's API servers trust, as they publish it in `kube-system/extension-apiserver-authentication`. It is watched:
//! CAs rotate, and a process that read them once refuses everybody afterwards.

use std::{collections::BTreeMap, fmt, sync::Arc};

use arc_swap::ArcSwapOption;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use serde::Deserialize;

use crate::watch;

/// Where it is.
const CONFIG_MAP: (&str, &str) = ("kube-system", "extension-apiserver-authentication");

/// A ConfigMap, as far as it is read here.
#[derive(kube::Resource, Clone, Debug, Default, Deserialize)]
#[resource(inherit = "k8s_openapi::api::core::v1::ConfigMap")]
struct ConfigMap {
    metadata: ObjectMeta,
    #[serde(default)]
    data: BTreeMap<String, String>,
}

/// A CA bundle that certificates of callers are verified by.
#[derive(Clone)]
pub(super) struct Authority {
    verifier: Arc<dyn ClientCertVerifier>,
    certificates: Vec<CertificateDer<'static>>,
}

/// Those who may say on whose behalf they ask: the API servers themselves.
#[derive(Clone, Debug)]
pub(super) struct FrontProxy {
    /// Who signs them.
    pub(super) authority: Authority,
    /// Their common names; empty is any.
    pub(super) names: Vec<String>,
    /// Headers with the user's name.
    pub(super) user_headers: Vec<String>,
    /// Headers with the user's uid.
    pub(super) uid_headers: Vec<String>,
    /// Headers with groups.
    pub(super) group_headers: Vec<String>,
    /// What headers with more begin with, in lower case.
    pub(super) extra_prefixes: Vec<String>,
}

/// What the ConfigMap says.
#[derive(Clone, Debug, Default)]
pub(super) struct Trust {
    /// Who signs client certificates of users.
    pub(super) clients: Option<Authority>,
    /// Who may speak for users.
    pub(super) front_proxy: Option<FrontProxy>,
}

/// The present [`Trust`]; none before it has been read.
pub(super) type TrustSlot = ArcSwapOption<Trust>;

/// Keeps it, for ever.
pub(super) async fn keep(client: Client, slot: &TrustSlot) {
    let (namespace, name) = CONFIG_MAP;
    let api = Api::<ConfigMap>::namespaced(client, namespace);
    // Without it nobody is trusted.
    let read = |map: ConfigMap| Arc::new(Trust::read(&map.data));
    watch::one(api, name, |map| slot.store(map.map(read))).await;
}

impl Trust {
    fn read(data: &BTreeMap<String, String>) -> Self {
        let authority = |key: &str| data.get(key).and_then(|pem| Authority::read(key, pem));
        let clients = authority("client-ca-file");
        let front = authority("requestheader-client-ca-file");
        Self {
            front_proxy: front.and_then(|front| FrontProxy::read(data, front, clients.as_ref())),
            clients,
        }
    }
}

impl Authority {
    fn read(key: &str, pem: &str) -> Option<Self> {
        let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
            .filter_map(Result::ok)
            .collect();
        let mut roots = RootCertStore::empty();
        let (_, unusable) = roots.add_parsable_certificates(certificates.iter().cloned());
        if unusable > 0 {
            tracing::warn!(key, unusable, "some CAs of the cluster can't be used");
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        // Without a root it can't be built, and nobody is trusted.
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .ok()?;
        Some(Self {
            verifier,
            certificates,
        })
    }

    /// Whether it has signed a chain that is valid now, for a client.
    pub(super) fn has_signed(&self, chain: &[CertificateDer<'static>]) -> bool {
        let now = UnixTime::now();
        chain.split_first().is_some_and(|(leaf, more)| {
            let verifier = &self.verifier;
            verifier.verify_client_cert(leaf, more, now).is_ok()
        })
    }
}

impl FrontProxy {
    fn read(
        data: &BTreeMap<String, String>,
        authority: Authority,
        clients: Option<&Authority>,
    ) -> Option<Self> {
        let list = |key: &str| list(data, key);
        let names = list("requestheader-allowed-names")?;
        let is_shared = clients.is_some_and(|clients| {
            let mut certificates = clients.certificates.iter();
            certificates.any(|one| authority.certificates.contains(one))
        });
        if names.is_empty() && is_shared {
            // Every user with a certificate could claim to be anybody.
            tracing::error!(
                "the API server's front proxy has the CA of its clients and no allowed names: its headers are not believed"
            );
            return None;
        }
        let prefixes = list("requestheader-extra-headers-prefix")?.into_iter();
        Some(Self {
            authority,
            names,
            user_headers: list("requestheader-username-headers")?,
            uid_headers: list("requestheader-uid-headers")?,
            group_headers: list("requestheader-group-headers")?,
            extra_prefixes: prefixes.map(|prefix| prefix.to_ascii_lowercase()).collect(),
        })
    }
}

/// A list of texts. It may be absent or null, which is empty; what can't be read is `None`: an empty list of names would mean
/// everybody.
fn list(data: &BTreeMap<String, String>, key: &str) -> Option<Vec<String>> {
    let text = data.get(key).map_or("null", String::as_str);
    let read = serde_json::from_str::<Option<Vec<String>>>(text);
    let list = read.inspect_err(
        |error| tracing::error!(key, %error, "the API server's front proxy is not known by this"),
    );
    Some(list.ok()?.unwrap_or_default())
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} certificates", self.certificates.len())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
    use serde_json::json;

    use super::*;

    /// A CA and what it signs.
    pub(in crate::view) struct Ca {
        issuer: Issuer<'static, KeyPair>,
        pem: String,
    }

    impl Ca {
        pub(in crate::view) fn new(name: &str) -> Self {
            let key = KeyPair::generate().expect("a key");
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let pem = params.self_signed(&key).expect("a CA").pem();
            Self {
                issuer: Issuer::new(params, key),
                pem,
            }
        }

        /// A client certificate for this common name in this organization.
        pub(in crate::view) fn sign(&self, name: &str, group: &str) -> CertificateDer<'static> {
            let mut params = CertificateParams::default();
            params.distinguished_name = rcgen::DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, name);
            let organization = DnType::OrganizationName;
            params.distinguished_name.push(organization, group);
            params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
            let key = KeyPair::generate().expect("a key");
            let signed = params.signed_by(&key, &self.issuer).expect("a certificate");
            signed.der().clone()
        }
    }

    /// What a cluster with these CAs publishes.
    pub(in crate::view) fn published(clients: &Ca, front: &Ca, names: &[&str]) -> Trust {
        let list = |list: &[&str]| json!(list).to_string();
        let data = [
            ("client-ca-file", clients.pem.clone()),
            ("requestheader-client-ca-file", front.pem.clone()),
            ("requestheader-allowed-names", list(names)),
            ("requestheader-username-headers", list(&["X-Remote-User"])),
            ("requestheader-uid-headers", list(&["X-Remote-Uid"])),
            ("requestheader-group-headers", list(&["X-Remote-Group"])),
            (
                "requestheader-extra-headers-prefix",
                list(&["X-Remote-Extra-"]),
            ),
        ];
        Trust::read(&data.map(|(key, value)| (key.to_owned(), value)).into())
    }

    #[test]
    fn one_ca_for_everybody_needs_names() {
        let (clients, front) = (Ca::new("clients"), Ca::new("front"));
        assert!(published(&clients, &front, &[]).front_proxy.is_some());
        assert!(published(&clients, &clients, &[]).front_proxy.is_none());
        let named = published(&clients, &clients, &["front-proxy-client"]);
        assert!(named.front_proxy.is_some());
    }

    #[test]
    fn names_that_can_not_be_read_are_not_everybody() {
        let key = "requestheader-allowed-names";
        let read = |text: &str| list(&[(key.to_owned(), text.to_owned())].into(), key);
        assert_eq!(read("null"), Some(vec![]));
        assert_eq!(read(r#"["a"]"#), Some(vec!["a".to_owned()]));
        assert_eq!(list(&BTreeMap::new(), key), Some(vec![]));
        for bad in ["", "a", r#"["a""#, r#"{"a":1}"#, "[1]"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_authority_knows_what_it_has_signed() {
        let (ours, other) = (Ca::new("ours"), Ca::new("ours"));
        let authority = Authority::read("", &ours.pem).expect("a CA");
        assert!(authority.has_signed(&[ours.sign("a", "g")]));
        assert!(!authority.has_signed(&[other.sign("a", "g")]));
        assert!(!authority.has_signed(&[]));
        assert!(!authority.has_signed(&[CertificateDer::from(vec![1, 2, 3])]));
        assert!(Authority::read("", "no PEM").is_none());
    }
}
