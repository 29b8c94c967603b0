//! What a request to an API server asks for, and which requests a test means.

use http::Method;

/// What a path names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resource<'a> {
    pub(crate) group: &'a str,
    pub(crate) version: &'a str,
    pub(crate) plural: &'a str,
    pub(crate) namespace: Option<&'a str>,
    pub(crate) name: Option<&'a str>,
    pub(crate) subresource: Option<&'a str>,
}

/// Which requests a test means, and how many of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meant {
    verb: String,
    path: String,
    pub(crate) skip: u32,
    /// None: all.
    pub(crate) left: Option<u32>,
}

// === impl Resource ===

impl<'a> Resource<'a> {
    /// None for a path of something else, such as `/version`.
    pub(crate) fn parse(path: &'a str) -> Option<Self> {
        let parts: Vec<_> = path.trim_matches('/').split('/').collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", version, rest),
            ["apis", group, version, rest @ ..] => (*group, version, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            // `namespaces/x/status` is a subresource of a Namespace, `namespaces/x/pods` are pods.
            ["namespaces", namespace, rest @ ..]
                if !matches!(rest, [] | ["status" | "finalize"]) =>
            {
                (Some(*namespace), rest)
            }
            _ => (None, rest),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (plural, None, None),
            [plural, name] => (plural, Some(*name), None),
            [plural, name, subresource] => (plural, Some(*name), Some(*subresource)),
            _ => return None,
        };
        Some(Self {
            group,
            version,
            plural,
            namespace,
            name,
            subresource,
        })
    }
}

/// What the API calls it: a GET may be a `LIST` or, as its query says, a `WATCH`.
pub(crate) fn verb(method: &Method, path: &str, query: &str) -> &'static str {
    let watches = form_urlencoded::parse(query.as_bytes())
        .any(|(key, value)| key == "watch" && matches!(&*value, "true" | "1"));
    match method.as_str() {
        "GET" if watches => "WATCH",
        "GET" if Resource::parse(path).is_some_and(|resource| resource.name.is_none()) => "LIST",
        "GET" => "GET",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        _ => "OTHER",
    }
}

// === impl Meant ===

impl Meant {
    /// One request with this verb (`*`: any) whose path ends in these segments, `*` being any one.
    pub(crate) fn on(verb: &str, path: &str) -> Self {
        Self {
            verb: verb.to_owned(),
            path: path.to_owned(),
            skip: 0,
            left: Some(1),
        }
    }

    pub(crate) fn fits(&self, verb: &str, path: &str) -> bool {
        let verb_fits = self.verb == "*" || self.verb == verb;
        self.left != Some(0) && verb_fits && path_fits(&self.path, path)
    }

    /// Counts a request that fits; whether it is meant, and not one of those to be skipped.
    pub(crate) fn meets(&mut self) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        self.left = self.left.map(|left| left.saturating_sub(1));
        true
    }
}

impl std::fmt::Display for Meant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.path)
    }
}

fn path_fits(pattern: &str, path: &str) -> bool {
    let mut parts = path.trim_matches('/').rsplit('/');
    let mut pattern = pattern
        .trim_matches('/')
        .rsplit('/')
        .filter(|wanted| !wanted.is_empty());
    pattern.all(|wanted| {
        parts
            .next()
            .is_some_and(|part| wanted == "*" || wanted == part)
    })
}
