//! Who is asking: by the API server's front proxy, by a client certificate, or by a bearer token, in this order.

use std::collections::BTreeMap;

use hyper::{HeaderMap, header::AUTHORIZATION};
use percent_encoding::percent_decode_str;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::trust::{FrontProxy, Trust};

/// Tokens of service accounts have about 1 KiB.
const LONGEST_TOKEN: usize = 16 << 10;
const ANONYMOUS: &str = "system:anonymous";
const AUTHENTICATED: &str = "system:authenticated";

/// A user, as reviews have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct User {
    /// Their name.
    #[serde(alias = "username", rename(serialize = "user"))]
    pub(super) name: String,
    /// Their uid, which may be empty.
    pub(super) uid: String,
    /// Their groups.
    pub(super) groups: Vec<String>,
    /// Whatever else is known of them.
    pub(super) extra: BTreeMap<String, Vec<String>>,
}

/// What a request says of its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Claimed<'a> {
    /// This is proven.
    User(User),
    /// This has to be asked about.
    Token(&'a str),
    /// Nothing, or nothing that is worth a question.
    Nobody,
}

/// Reads it. Headers of the front proxy count only beside a certificate of its own CA and of an allowed name, whatever else a
/// stranger may send.
pub(super) fn claimed<'a>(
    trust: &Trust,
    chain: &[CertificateDer<'static>],
    headers: &'a HeaderMap,
) -> Claimed<'a> {
    let front = trust.front_proxy.as_ref();
    let user = front
        .and_then(|front| by_front_proxy(front, chain, headers))
        .or_else(|| by_certificate(trust, chain));
    match (user, token(headers)) {
        (Some(user), _) => Claimed::User(with_everybody(user)),
        (None, Some(token)) => Claimed::Token(token),
        (None, None) => Claimed::Nobody,
    }
}

/// Every user who is known is in this group. The API server says so of nobody whom it speaks for itself, and without it RBAC
/// would refuse its own requests.
pub(super) fn with_everybody(mut user: User) -> User {
    let is_in = |group: &str| user.groups.iter().any(|of| of == group);
    if user.name != ANONYMOUS && !is_in(AUTHENTICATED) {
        user.groups.push(AUTHENTICATED.to_owned());
    }
    user
}

fn by_front_proxy(
    front: &FrontProxy,
    chain: &[CertificateDer<'static>],
    headers: &HeaderMap,
) -> Option<User> {
    let (name, _) = subject(chain.first()?)?;
    let is_allowed = front.names.is_empty() || front.names.contains(&name);
    if !is_allowed || !front.authority.has_signed(chain) {
        return None;
    }
    let values = |names: &[String]| -> Vec<String> {
        let values = names.iter().flat_map(|name| headers.get_all(name));
        let texts = values.filter_map(|value| std::str::from_utf8(value.as_bytes()).ok());
        let texts = texts.filter(|text| !text.is_empty());
        texts.map(str::to_owned).collect()
    };
    Some(User {
        name: values(&front.user_headers).into_iter().next()?,
        uid: values(&front.uid_headers)
            .into_iter()
            .next()
            .unwrap_or_default(),
        groups: values(&front.group_headers),
        extra: extra(front, headers),
    })
}

/// Keys are escaped, and in lower case: header names have no case.
fn extra(front: &FrontProxy, headers: &HeaderMap) -> BTreeMap<String, Vec<String>> {
    let mut extra = BTreeMap::<String, Vec<String>>::new();
    for (name, value) in headers {
        let mut prefixes = front.extra_prefixes.iter();
        let key = prefixes.find_map(|prefix| name.as_str().strip_prefix(prefix.as_str()));
        if let (Some(key), Ok(value)) = (key, std::str::from_utf8(value.as_bytes())) {
            let key = percent_decode_str(key).decode_utf8_lossy().to_lowercase();
            extra.entry(key).or_default().push(value.to_owned());
        }
    }
    extra
}

fn by_certificate(trust: &Trust, chain: &[CertificateDer<'static>]) -> Option<User> {
    let clients = trust.clients.as_ref()?;
    let (name, groups) = subject(chain.first()?)?;
    (!name.is_empty() && clients.has_signed(chain)).then(|| User {
        name,
        groups,
        ..User::default()
    })
}

/// Common name and organizations; of several common names the last, as Go and so the API server has it.
fn subject(certificate: &CertificateDer<'_>) -> Option<(String, Vec<String>)> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let subject = certificate.subject();
    let name = subject.iter_common_name().last()?.as_str().ok()?;
    let groups = subject.iter_organization().map(|name| name.as_str().ok());
    let groups: Option<Vec<_>> = groups.map(|group| Some(group?.to_owned())).collect();
    Some((name.to_owned(), groups?))
}

fn token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    let fits = !token.is_empty() && token.len() <= LONGEST_TOKEN;
    (scheme.eq_ignore_ascii_case("bearer") && fits).then_some(token)
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::{
        super::trust::tests::{Ca, published},
        *,
    };

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            let name = HeaderName::try_from(*name).expect("a name");
            (name, HeaderValue::from_str(value).expect("a value"))
        });
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value);
        }
        headers
    }

    fn user(name: &str, groups: &[&str]) -> User {
        User {
            name: name.to_owned(),
            groups: groups.iter().map(|&group| group.to_owned()).collect(),
            ..User::default()
        }
    }

    const SPOKEN_FOR: [(&str, &str); 6] = [
        ("X-Remote-User", "alice"),
        ("X-Remote-Uid", "7"),
        ("X-Remote-Group", "dev"),
        ("X-Remote-Group", "ops"),
        ("X-Remote-Extra-Example.com%2FScopes", "a"),
        ("X-Remote-Extra-Example.com%2FScopes", "b"),
    ];

    #[test]
    fn the_front_proxy_speaks_for_others() {
        let (clients, front) = (Ca::new("clients"), Ca::new("front"));
        let trust = published(&clients, &front, &["front-proxy-client"]);
        let chain = [front.sign("front-proxy-client", "")];
        let scopes = (
            "example.com/scopes".to_owned(),
            vec!["a".to_owned(), "b".to_owned()],
        );
        let expected = User {
            uid: "7".to_owned(),
            extra: [scopes].into(),
            ..user("alice", &["dev", "ops", AUTHENTICATED])
        };
        let headers = headers(&SPOKEN_FOR);
        let claimed = claimed(&trust, &chain, &headers);
        assert_eq!(claimed, Claimed::User(expected));
    }

    #[test]
    fn its_own_requests_are_of_a_user_who_is_known() {
        let (clients, front) = (Ca::new("clients"), Ca::new("front"));
        let trust = published(&clients, &front, &[]);
        let chain = [front.sign("whoever", "")];
        let said = |name: &str| {
            let headers = headers(&[("X-Remote-User", name)]);
            claimed(&trust, &chain, &headers) == Claimed::User(user(name, &[AUTHENTICATED]))
        };
        assert!(said("system:aggregator"));
        assert!(!said(ANONYMOUS), "nobody is not somebody");
    }

    #[test]
    fn nobody_else_speaks_for_anybody() {
        let (clients, front, other) = (Ca::new("clients"), Ca::new("front"), Ca::new("other"));
        let trust = published(&clients, &front, &["front-proxy-client"]);
        let headers = headers(&SPOKEN_FOR);
        for (who, chain) in [
            ("no certificate", vec![]),
            ("another CA", vec![other.sign("front-proxy-client", "")]),
            ("another name", vec![front.sign("somebody", "")]),
        ] {
            assert_eq!(claimed(&trust, &chain, &headers), Claimed::Nobody, "{who}");
        }
        // A user with a certificate is that user, with the front proxy's own name too.
        for name in ["bob", "front-proxy-client"] {
            let chain = [clients.sign(name, "dev")];
            let expected = Claimed::User(user(name, &["dev", AUTHENTICATED]));
            assert_eq!(claimed(&trust, &chain, &headers), expected);
        }
    }

    #[test]
    fn tokens_are_asked_about_where_nothing_is_proven() {
        let (clients, front) = (Ca::new("clients"), Ca::new("front"));
        let trust = published(&clients, &front, &[]);
        let long = format!("Bearer {}", "x".repeat(LONGEST_TOKEN + 1));
        for (value, expected) in [
            ("Bearer abc", Claimed::Token("abc")),
            ("bearer  abc ", Claimed::Token("abc")),
            ("Bearer ", Claimed::Nobody),
            ("Basic abc", Claimed::Nobody),
            (&long, Claimed::Nobody),
        ] {
            let headers = headers(&[("Authorization", value)]);
            let read = claimed(&trust, &[], &headers);
            assert_eq!(read, expected);
        }
        let headers = headers(&[("Authorization", "Bearer abc")]);
        let chain = [clients.sign("bob", "dev")];
        assert!(matches!(
            claimed(&trust, &chain, &headers),
            Claimed::User(_)
        ));
    }
}
