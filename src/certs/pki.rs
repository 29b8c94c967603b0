//! Issues certificates, and reads what of a bundle can be used. Pure but for the keys' randomness.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
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

use super::rotation::{Dates, LeafState, Lifetimes, State};

/// A certificate is valid from so long before it is made: an API server's clock may be behind that of the replica that made it.
const BACKDATED: TimeDelta = TimeDelta::hours(1);
/// How a certificate begins and ends in a PEM text.
const PEM: [&str; 2] = ["-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"];

/// PEM texts as they stand in the Secret, or in files; what is missing is empty.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Bundle {
    /// CA certificates, newest first; any of them may have issued the leaf.
    pub ca: String,
    /// Key of the first CA.
    pub ca_key: String,
    /// The leaf, and what is between it and its CA.
    pub cert: String,
    /// The leaf's key.
    pub key: String,
}

/// A bundle that has been read.
#[derive(Debug)]
pub struct Held {
    /// Its texts; of the CAs only what can be used.
    pub bundle: Bundle,
    /// The leaf, or why it can't be served.
    pub leaf: Result<Leaf, PkiError>,
    /// The CAs, in order.
    authorities: Vec<Authority>,
    has_key: bool,
}

/// A leaf that can be served for all names.
#[derive(Clone, Debug)]
pub struct Leaf {
    /// Chain and key.
    pub key: Arc<CertifiedKey>,
    /// Its dates, and its CA.
    pub state: LeafState,
    /// When its CA ends.
    pub authority_ends: DateTime<Utc>,
}

#[derive(Debug)]
struct Authority {
    pem: String,
    der: CertificateDer<'static>,
    public_key: Vec<u8>,
    dates: Dates,
}

/// Why certificates could not be made or can't be served.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// They could not be made.
    #[error("certificates could not be issued")]
    Issue(#[from] rcgen::Error),
    /// A text has no certificate.
    #[error("{0} holds no certificate that can be read")]
    Empty(&'static str),
    /// The key can't be read.
    #[error("tls.key is no PEM")]
    Key(#[source] rustls::pki_types::pem::Error),
    /// The leaf does not verify.
    #[error("the certificate does not verify under the CA")]
    Verify(#[source] rustls::Error),
    /// The leaf and its key are no pair.
    #[error("the certificate can't be used with its key")]
    Pair(#[source] rustls::Error),
    /// The verifier can't be built from a CA.
    #[error("the CA can't be used")]
    Root(#[source] rustls::client::VerifierBuilderError),
    /// A name can't be in a certificate.
    #[error("{0:?} is no DNS name or address")]
    Name(String),
}

impl Bundle {
    /// With a new CA, to stand before those that there are. The leaf stays.
    ///
    /// # Errors
    /// When there is no randomness for a key.
    pub fn with_authority(
        self,
        lifetimes: Lifetimes,
        now: DateTime<Utc>,
    ) -> Result<Self, PkiError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params
            .distinguished_name
            .push(DnType::CommonName, "headstart-ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        valid(&mut params, now, now + lifetimes.authority);
        Ok(Self {
            ca: params.self_signed(&key)?.pem() + &self.ca,
            ca_key: key.serialize_pem(),
            ..self
        })
    }

    /// With a new leaf for `names`, of the first CA, which it does not outlive.
    ///
    /// # Errors
    /// When a name can't be in a certificate, or the CA can't issue.
    pub fn with_leaf(
        self,
        names: &[String],
        lifetimes: Lifetimes,
        now: DateTime<Utc>,
    ) -> Result<Self, PkiError> {
        let mut authorities = authorities(&self.ca);
        let authority = authorities.next().ok_or(PkiError::Empty("ca.crt"))?;
        let ca_key = KeyPair::from_pem(&self.ca_key)?;
        let issuer = Issuer::from_ca_cert_der(&authority.der, ca_key)?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names)?;
        params
            .distinguished_name
            .push(DnType::CommonName, "headstart");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let ends = authority.dates.ends.min(now + lifetimes.leaf);
        valid(&mut params, now, ends);
        Ok(Self {
            cert: params.signed_by(&key, &issuer)?.pem(),
            key: key.serialize_pem(),
            ..self.clone()
        })
    }
}

impl Held {
    /// Reads a bundle, for a leaf that is served under all `names` at `now`.
    #[must_use]
    pub fn read(bundle: Bundle, names: &[String], now: DateTime<Utc>) -> Self {
        let mut all = Vec::<Authority>::new();
        for authority in authorities(&bundle.ca) {
            if all.iter().all(|other| other.der != authority.der) {
                all.push(authority);
            }
        }
        let has_key = all.first().is_some_and(|first| {
            KeyPair::from_pem(&bundle.ca_key)
                .is_ok_and(|key| key.public_key_raw() == first.public_key)
        });
        let leaf = Leaf::read(&bundle, &all, names, now);
        Self {
            bundle: Bundle {
                ca: all.iter().map(|authority| &*authority.pem).collect(),
                ..bundle
            },
            leaf,
            authorities: all,
            has_key,
        }
    }

    /// What rotation is decided by.
    #[must_use]
    pub fn state(&self) -> State {
        State {
            authorities: self.authorities.iter().map(|each| each.dates).collect(),
            has_key: self.has_key,
            leaf: self.leaf.as_ref().ok().map(|leaf| leaf.state),
        }
    }

    /// Its CAs, as roots.
    #[must_use]
    pub fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(self.authorities.iter().map(|each| each.der.clone()));
        roots
    }

    /// Its texts without the CAs that no valid leaf can be of.
    #[must_use]
    pub fn needed(&self, lifetimes: Lifetimes, now: DateTime<Utc>) -> Bundle {
        let state = self.state();
        let needed = self.authorities.iter().enumerate();
        let needed = needed.filter(|(index, _)| state.needs(*index, lifetimes, now));
        Bundle {
            ca: needed.map(|(_, authority)| &*authority.pem).collect(),
            ..self.bundle.clone()
        }
    }
}

impl Leaf {
    fn read(
        bundle: &Bundle,
        authorities: &[Authority],
        names: &[String],
        now: DateTime<Utc>,
    ) -> Result<Self, PkiError> {
        let chain: Vec<_> = certificates(&bundle.cert).map(|(_, der)| der).collect();
        let (leaf, between) = chain.split_first().ok_or(PkiError::Empty("tls.crt"))?;
        let dates = dates(&parse(leaf).ok_or(PkiError::Empty("tls.crt"))?);
        // Of a leaf that is not valid yet, whoever made it knew the time better than we do.
        let at = now.max(dates.made - BACKDATED);
        let mut trouble = PkiError::Empty("ca.crt");
        let issuer = authorities.iter().position(|authority| {
            let verified = authority.verify(leaf, between, names, at);
            verified.map_err(|error| trouble = error).is_ok()
        });
        let Some(issuer) = issuer else {
            return Err(trouble);
        };
        let key = PrivateKeyDer::from_pem_slice(bundle.key.as_bytes()).map_err(PkiError::Key)?;
        let provider = rustls::crypto::ring::default_provider();
        let authority_ends = authorities[issuer].dates.ends;
        let ends = dates.ends.min(authority_ends);
        let key = CertifiedKey::from_der(chain, key, &provider).map_err(PkiError::Pair)?;
        Ok(Self {
            key: Arc::new(key),
            state: LeafState {
                dates: Dates { ends, ..dates },
                issuer,
            },
            authority_ends,
        })
    }
}

impl Authority {
    /// Whether it makes this leaf good for all names.
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        names: &[String],
        at: DateTime<Utc>,
    ) -> Result<(), PkiError> {
        if self.dates.ends <= at {
            // rustls asks no root for its dates; API servers do.
            let ended = rustls::CertificateError::Expired;
            return Err(PkiError::Verify(ended.into()));
        }
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).map_err(PkiError::Verify)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(PkiError::Root)?;
        let at = u64::try_from(at.timestamp()).unwrap_or_default();
        let at = UnixTime::since_unix_epoch(Duration::from_secs(at));
        for name in names {
            let name =
                ServerName::try_from(name.as_str()).map_err(|_| PkiError::Name(name.clone()))?;
            verifier
                .verify_server_cert(leaf, between, &name, &[], at)
                .map_err(PkiError::Verify)?;
        }
        Ok(())
    }
}

/// The certificates of a PEM text that can be read, each with its part of the text.
fn certificates(text: &str) -> impl Iterator<Item = (&str, CertificateDer<'static>)> {
    let [begin, end] = PEM;
    text.split_inclusive(end).filter_map(move |part| {
        let part = &part[part.rfind(begin)?..];
        Some((part, CertificateDer::from_pem_slice(part.as_bytes()).ok()?))
    })
}

/// Those of them that can be CAs.
fn authorities(text: &str) -> impl Iterator<Item = Authority> {
    certificates(text).filter_map(|(pem, der)| {
        RootCertStore::empty().add(der.clone()).ok()?;
        let parsed = parse(&der)?;
        Some(Authority {
            pem: format!("{pem}\n"),
            public_key: parsed.public_key().subject_public_key.data.to_vec(),
            dates: dates(&parsed),
            der,
        })
    })
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Option<x509_parser::certificate::X509Certificate<'a>> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    Some(certificate)
}

fn dates(certificate: &x509_parser::certificate::X509Certificate<'_>) -> Dates {
    let validity = certificate.validity();
    let at = |time: &x509_parser::time::ASN1Time| {
        DateTime::from_timestamp(time.timestamp(), 0).expect("chrono goes beyond the year 9999")
    };
    Dates {
        made: at(&validity.not_before) + BACKDATED,
        ends: at(&validity.not_after),
    }
}

/// Sets the dates of what is made now.
fn valid(params: &mut CertificateParams, now: DateTime<Utc>, ends: DateTime<Utc>) {
    // rcgen has dates of the `time` crate; counting from a day that it makes itself spares us the dependency.
    let at = |at: DateTime<Utc>| {
        let seconds = u64::try_from(at.timestamp()).expect("clocks show no time before 1970");
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds)
    };
    params.not_before = at(now - BACKDATED);
    params.not_after = at(ends);
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

    const LIFETIMES: Lifetimes = Lifetimes {
        leaf: TimeDelta::days(90),
        authority: TimeDelta::days(3650),
    };

    fn names() -> Vec<String> {
        vec!["headstart.ns.svc".to_owned(), "127.0.0.1".to_owned()]
    }

    /// A time with whole seconds, as certificates have them.
    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_800_000_000, 0).expect("a time")
    }

    fn issue() -> Bundle {
        let bundle = Bundle::default().with_authority(LIFETIMES, now());
        let bundle = bundle.and_then(|bundle| bundle.with_leaf(&names(), LIFETIMES, now()));
        bundle.expect("it can be issued")
    }

    fn state_of(bundle: &Bundle, at: DateTime<Utc>) -> State {
        Held::read(bundle.clone(), &names(), at).state()
    }

    #[test]
    fn dates_are_exact_to_the_second() {
        let state = state_of(&issue(), now());
        let made = now();
        let ends = made + LIFETIMES.leaf;
        let leaf = state.leaf.expect("it can be served");
        assert_eq!(leaf.dates, Dates { made, ends });
        let ends = made + LIFETIMES.authority;
        assert_eq!(state.authorities, [Dates { made, ends }]);
        assert!(state.has_key);
    }

    #[test]
    fn a_leaf_is_served_until_it_ends_and_by_clocks_that_are_behind() {
        let bundle = issue();
        let serves = |at| state_of(&bundle, at).leaf.is_some();
        let (second, ends) = (TimeDelta::seconds(1), now() + LIFETIMES.leaf);
        assert!(serves(ends - second));
        assert!(!serves(ends + second));
        assert!(serves(now() - TimeDelta::hours(1)));
    }

    #[test]
    fn a_leaf_ends_with_its_ca_at_the_latest() {
        let late = now() + LIFETIMES.authority - TimeDelta::days(1);
        let renewed = issue().with_leaf(&names(), LIFETIMES, late);
        let state = state_of(&renewed.expect("it can be issued"), late);
        let leaf = state.leaf.expect("it can be served");
        assert_eq!(leaf.dates.ends, state.authorities[0].ends);
    }

    #[test]
    fn a_ca_that_has_ended_makes_nothing_good() {
        let lifetimes = Lifetimes {
            authority: TimeDelta::days(1),
            ..LIFETIMES
        };
        // As somebody else may have made it: the leaf outlives its CA.
        let leaf = issue();
        let short = Bundle::default().with_authority(lifetimes, now());
        let short = short.expect("it can be issued");
        let short = short.with_leaf(&names(), LIFETIMES, now());
        let short = short.expect("it can be issued");
        let both = Bundle {
            ca: format!("{}{}", leaf.ca, short.ca),
            ..short
        };
        let at = now() + TimeDelta::days(2);
        assert_eq!(state_of(&both, at).leaf, None);
    }

    #[test]
    fn a_new_ca_stands_first_and_the_leaf_stays() {
        let old = issue();
        let both = old.clone().with_authority(LIFETIMES, now());
        let both = both.expect("it can be issued");
        assert!(both.ca.ends_with(&old.ca) && both.ca_key != old.ca_key);
        let state = state_of(&both, now());
        assert!(state.has_key);
        assert_eq!(state.leaf.map(|leaf| leaf.issuer), Some(1));
        let new = both.with_leaf(&names(), LIFETIMES, now());
        let state = state_of(&new.expect("it can be issued"), now());
        assert_eq!(state.leaf.map(|leaf| leaf.issuer), Some(0));
    }

    #[test]
    fn what_is_around_certificates_is_left_out_and_one_is_held_once() {
        let bundle = issue();
        let broken = bundle.ca.replace("MII", "!!!");
        let noisy = format!("# ours\n{broken}{}\n\n{}x", bundle.ca, bundle.ca.trim());
        let noisy = Bundle {
            ca: noisy,
            ..bundle.clone()
        };
        let held = Held::read(noisy, &names(), now());
        assert!(held.bundle == bundle);
        assert!(held.leaf.is_ok());
    }

    #[test]
    fn a_leaf_that_cannot_be_served_says_why() {
        let (one, other) = (issue(), issue());
        for (what, bundle) in [
            (
                "tls.crt holds no certificate that can be read",
                Bundle {
                    cert: "x".to_owned(),
                    ..one.clone()
                },
            ),
            (
                "ca.crt holds no certificate that can be read",
                Bundle {
                    ca: String::new(),
                    ..one.clone()
                },
            ),
            (
                "the certificate does not verify under the CA",
                Bundle {
                    ca: other.ca.clone(),
                    ..one.clone()
                },
            ),
            (
                "the certificate can't be used with its key",
                Bundle {
                    key: other.key.clone(),
                    ..one.clone()
                },
            ),
            (
                "tls.key is no PEM",
                Bundle {
                    key: String::new(),
                    ..one.clone()
                },
            ),
        ] {
            let held = Held::read(bundle, &names(), now());
            let trouble = held.leaf.expect_err(what).to_string();
            assert_eq!(trouble, what);
        }
        let elsewhere = ["elsewhere.ns.svc".to_owned()];
        assert!(Held::read(one.clone(), &elsewhere, now()).leaf.is_err());
        let key = Bundle {
            ca_key: other.ca_key,
            ..one
        };
        assert!(!state_of(&key, now()).has_key);
    }
}
