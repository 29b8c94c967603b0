//! The parameters of a list: how many, from where, of which boost.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

use super::{
    failure::Failure,
    resource::{Resource, Target},
};
use crate::{api::BOOST_KEY, claims::Place};

/// Objects in a page, where the client does not say.
const USUAL: usize = 500;
/// At most: a page is made in memory.
const MOST: usize = 5000;
/// A token holds two names.
const LONGEST_TOKEN: usize = 1024;

/// What a table's rows carry of their objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Include {
    /// Names.
    #[default]
    Metadata,
    /// Nothing.
    None,
    /// All of it.
    Object,
}

/// A list as it was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    /// Objects in the page.
    pub(super) limit: usize,
    /// Where the last page has ended.
    pub(super) after: Place,
    /// Only pods with this claim.
    pub(super) claim: Option<String>,
    /// For tables.
    pub(super) include: Include,
}

impl Query {
    /// Reads the parameters for a target. What narrows a list and is not understood is refused: ignoring it would show too
    /// much. All else is ignored, as the API server does.
    pub(super) fn read(query: &str, target: &Target) -> Result<Self, Failure> {
        let mut read = Self {
            limit: USUAL,
            after: Place {
                namespace: target.namespace.clone().unwrap_or_default(),
                name: String::new(),
            },
            ..Self::default()
        };
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*key {
                "limit" if !value.is_empty() => read.limit = limit(&value)?,
                "continue" if !value.is_empty() => read.after = place(&value, target)?,
                "watch" if !matches!(&*value, "false" | "0") => {
                    return Err(Failure::MethodNotAllowed);
                }
                "labelSelector" if !value.is_empty() => {
                    read.claim = Some(claim(&value, target.resource)?);
                }
                "fieldSelector" if !value.is_empty() => {
                    return Err(bad("field selectors are not supported"));
                }
                "includeObject" => read.include = include(&value)?,
                _ => {}
            }
        }
        Ok(read)
    }
}

/// The token with which the next page goes on after a place.
pub(super) fn token(place: &Place) -> String {
    URL_SAFE_NO_PAD.encode(format!("v1/{}/{}", place.namespace, place.name))
}

fn bad(problem: &str) -> Failure {
    Failure::BadRequest(problem.to_owned())
}

/// Nothing is reserved for it, so a large number does no harm; one below 1 counts as none, as with the API server.
fn limit(text: &str) -> Result<usize, Failure> {
    let limit: i64 = text
        .parse()
        .map_err(|_| bad("limit is no whole number of 64 bits"))?;
    Ok(usize::try_from(limit)
        .ok()
        .filter(|limit| *limit > 0)
        .map_or(USUAL, |limit| limit.min(MOST)))
}

fn place(token: &str, target: &Target) -> Result<Place, Failure> {
    let read = || {
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let (namespace, name) = text.strip_prefix("v1/")?.split_once('/')?;
        let fits = match &target.namespace {
            Some(of) => namespace == of,
            None => namespace.is_empty() != target.resource.is_namespaced(),
        };
        (fits && !name.is_empty() && !name.contains('/')).then(|| Place {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    };
    let is_short = token.len() <= LONGEST_TOKEN;
    let place = is_short.then(read).flatten();
    place.ok_or_else(|| bad("continue is no token of this list; begin again without one"))
}

/// The one label that boosted pods show here.
fn claim(selector: &str, resource: Resource) -> Result<String, Failure> {
    let value = selector
        .strip_prefix(BOOST_KEY)
        .and_then(|rest| rest.strip_prefix("==").or(rest.strip_prefix('=')))
        .filter(|value| !value.is_empty() && !value.contains([',', '=']));
    match value {
        Some(value) if resource == Resource::BoostedPods => Ok(value.to_owned()),
        _ => Err(Failure::BadRequest(format!(
            "of label selectors only {BOOST_KEY}=BOOST is supported, for boostedpods"
        ))),
    }
}

fn include(text: &str) -> Result<Include, Failure> {
    match text {
        "" | "Metadata" => Ok(Include::Metadata),
        "None" => Ok(Include::None),
        "Object" => Ok(Include::Object),
        _ => Err(bad("includeObject must be None, Metadata or Object")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(namespace: Option<&str>) -> Target {
        Target {
            resource: Resource::BoostedPods,
            namespace: namespace.map(str::to_owned),
            name: None,
        }
    }

    #[test]
    fn limits_are_brought_within_bounds() {
        for (limit, expected) in [
            ("", USUAL),
            ("0", USUAL),
            ("-1", USUAL),
            ("-9223372036854775808", USUAL),
            ("1", 1),
            ("500", 500),
            ("2000000000", MOST),
            ("9223372036854775807", MOST),
        ] {
            let read = Query::read(&format!("limit={limit}"), &target(None));
            assert_eq!(read.expect(limit).limit, expected, "{limit}");
        }
        for limit in ["x", "1.5", "9223372036854775808"] {
            let read = Query::read(&format!("limit={limit}"), &target(None));
            assert!(matches!(read, Err(Failure::BadRequest(_))), "{limit}");
        }
    }

    #[test]
    fn tokens_of_other_lists_are_refused() {
        let place = |namespace: &str, name: &str| Place {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let of_n = token(&place("n", "p"));
        let read = |token: &str, namespace| {
            let read = Query::read(&format!("continue={token}"), &target(namespace));
            read.map(|query| query.after)
        };
        assert_eq!(read(&of_n, Some("n")), Ok(place("n", "p")));
        assert_eq!(read(&of_n, None), Ok(place("n", "p")));
        for (token, namespace) in [
            (of_n.as_str(), Some("other")),
            (&token(&place("", "p")), None),
            (&token(&place("n", "")), None),
            ("x", None),
            ("%00", None),
            (&"A".repeat(2000), None),
        ] {
            let read = read(token, namespace);
            assert!(matches!(read, Err(Failure::BadRequest(_))), "{token}");
        }
    }

    #[test]
    fn what_narrows_a_list_is_understood_or_refused() {
        let read = |query: &str| Query::read(query, &target(None));
        let key = "autoscaling.x-k8s.io%2Fstartup-cpu-boost";
        for equals in ["%3D", "%3D%3D"] {
            let query = read(&format!("labelSelector={key}{equals}b"));
            assert_eq!(query.expect("a claim").claim.as_deref(), Some("b"));
        }
        for query in [
            "labelSelector=app%3Dx".to_owned(),
            format!("labelSelector={key}"),
            format!("labelSelector={key}%3Db%2Capp%3Dx"),
            format!("labelSelector={key}!%3Db"),
            "fieldSelector=metadata.name%3Dx".to_owned(),
            "includeObject=All".to_owned(),
        ] {
            assert!(
                matches!(read(&query), Err(Failure::BadRequest(_))),
                "{query}"
            );
        }
        assert_eq!(read("watch=true"), Err(Failure::MethodNotAllowed));
        assert_eq!(read("watch=1"), Err(Failure::MethodNotAllowed));
        assert_eq!(read("watch="), Err(Failure::MethodNotAllowed));
        assert!(read("watch=false&resourceVersion=5&pretty=true").is_ok());
    }

    proptest! {
        #[test]
        fn any_query_is_read_or_refused(query in "([a-zA-Z]{1,9}|limit|continue)=[ -~]{0,40}(&(limit|continue|watch|labelSelector)=[ -~]{0,40}){0,4}") {
            if let Ok(query) = Query::read(&query, &target(None)) {
                prop_assert!((1..=MOST).contains(&query.limit));
            }
        }

        #[test]
        fn a_token_comes_back(namespace in "[a-z0-9-]{1,63}", name in "[a-z0-9.-]{1,253}") {
            let place = Place { namespace, name };
            let read = Query::read(&format!("continue={}", token(&place)), &target(None));
            prop_assert_eq!(read.expect("our own").after, place);
        }
    }
}
