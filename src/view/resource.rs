//! The resources, and what a path asks for.

use hyper::Method;

use super::failure::Failure;

/// The API group.
pub const GROUP: &str = "visibility.autoscaling.x-k8s.io";
/// Its one version.
pub const VERSION: &str = "v1alpha1";
/// Both, as objects name them.
pub(super) const API_VERSION: &str = "visibility.autoscaling.x-k8s.io/v1alpha1";

/// Kubernetes' own longest name.
const LONGEST_NAME: usize = 253;

/// What can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Resource {
    /// Pods whose boost is in force.
    BoostedPods,
    /// What each boost of a namespace has lent.
    BoostSummaries,
    /// What each boost of the cluster has lent.
    ClusterBoostSummaries,
}

impl Resource {
    /// All of them.
    pub(super) const ALL: [Self; 3] = [
        Self::BoostedPods,
        Self::BoostSummaries,
        Self::ClusterBoostSummaries,
    ];

    /// Its name in paths and rights.
    pub(super) const fn plural(self) -> &'static str {
        match self {
            Self::BoostedPods => "boostedpods",
            Self::BoostSummaries => "boostsummaries",
            Self::ClusterBoostSummaries => "clusterboostsummaries",
        }
    }

    /// Its name for one.
    pub(super) const fn singular(self) -> &'static str {
        match self {
            Self::BoostedPods => "boostedpod",
            Self::BoostSummaries => "boostsummary",
            Self::ClusterBoostSummaries => "clusterboostsummary",
        }
    }

    /// What people may type instead.
    pub(super) const fn short(self) -> &'static str {
        match self {
            Self::BoostedPods => "bpod",
            Self::BoostSummaries => "bsum",
            Self::ClusterBoostSummaries => "cbsum",
        }
    }

    /// Its objects' kind.
    pub(super) const fn kind(self) -> &'static str {
        match self {
            Self::BoostedPods => "BoostedPod",
            Self::BoostSummaries => "BoostSummary",
            Self::ClusterBoostSummaries => "ClusterBoostSummary",
        }
    }

    /// Whether its objects are in namespaces.
    pub(super) const fn is_namespaced(self) -> bool {
        !matches!(self, Self::ClusterBoostSummaries)
    }

    fn named(plural: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.plural() == plural)
    }
}

/// One object, or a list of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// Of what.
    pub(super) resource: Resource,
    /// In which namespace; none is all, or the cluster.
    pub(super) namespace: Option<String>,
    /// Which; none is a list.
    pub(super) name: Option<String>,
}

impl Target {
    /// The verb that a right is needed for.
    pub(super) const fn verb(&self) -> &'static str {
        if self.name.is_some() { "get" } else { "list" }
    }
}

/// What a path is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// `/apis`
    Groups,
    /// `/apis/GROUP`
    Group,
    /// `/apis/GROUP/VERSION`
    Version,
    /// Objects.
    Objects(Target),
}

impl Route {
    /// Reads a path. Nobody needs escapes in it: names have none.
    pub(super) fn read(method: &Method, path: &str) -> Result<Self, Failure> {
        let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (own, rest) = match segments[..] {
            ["apis"] => (Self::Groups, &[][..]),
            ["apis", GROUP] => (Self::Group, &[][..]),
            ["apis", GROUP, VERSION] => (Self::Version, &[][..]),
            ["apis", GROUP, VERSION, ..] => (Self::Version, &segments[3..]),
            _ => return Err(Failure::NoSuchPath),
        };
        let route = match *rest {
            [] => Some(own),
            ["namespaces", namespace, plural] => target(plural, Some(namespace), None),
            ["namespaces", namespace, plural, name] => target(plural, Some(namespace), Some(name)),
            [plural] => target(plural, None, None),
            [plural, name] => target(plural, None, Some(name)),
            _ => None,
        };
        let route = route.ok_or(Failure::NoSuchPath)?;
        if method == Method::GET {
            Ok(route)
        } else {
            Err(Failure::MethodNotAllowed)
        }
    }
}

fn target(plural: &str, namespace: Option<&str>, name: Option<&str>) -> Option<Route> {
    let resource = Resource::named(plural)?;
    let fits = match (resource.is_namespaced(), namespace, name) {
        // A single object has its namespace.
        (true, None, Some(_)) | (false, Some(_), _) => false,
        _ => [namespace, name].into_iter().flatten().all(is_name),
    };
    let owned = |text: Option<&str>| text.map(str::to_owned);
    fits.then(|| {
        Route::Objects(Target {
            resource,
            namespace: owned(namespace),
            name: owned(name),
        })
    })
}

fn is_name(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    (1..=LONGEST_NAME).contains(&text.len()) && text.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &str) -> Result<Route, Failure> {
        Route::read(&Method::GET, path)
    }

    fn objects(resource: Resource, namespace: Option<&str>, name: Option<&str>) -> Route {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        Route::Objects(Target {
            resource,
            namespace: owned(namespace),
            name: owned(name),
        })
    }

    #[test]
    fn paths_are_read() {
        let base = format!("/apis/{API_VERSION}");
        let pods = Resource::BoostedPods;
        for (path, route) in [
            ("/apis".to_owned(), Route::Groups),
            ("/apis/".to_owned(), Route::Groups),
            (format!("/apis/{GROUP}"), Route::Group),
            (base.clone(), Route::Version),
            (format!("{base}/boostedpods"), objects(pods, None, None)),
            (
                format!("{base}/namespaces/n/boostedpods"),
                objects(pods, Some("n"), None),
            ),
            (
                format!("{base}/namespaces/n/boostedpods/p-0.x"),
                objects(pods, Some("n"), Some("p-0.x")),
            ),
            (
                format!("{base}/clusterboostsummaries/b"),
                objects(Resource::ClusterBoostSummaries, None, Some("b")),
            ),
        ] {
            assert_eq!(read(&path), Ok(route), "{path}");
        }
    }

    #[test]
    fn other_paths_are_not_there() {
        let base = format!("/apis/{API_VERSION}");
        let long = "x".repeat(254);
        for path in [
            "/".to_owned(),
            "/openapi/v2".to_owned(),
            "/apis/apps".to_owned(),
            format!("{base}/pods"),
            format!("{base}/boostedpods/p"),
            format!("{base}/namespaces/n/clusterboostsummaries"),
            format!("{base}/namespaces/n/boostedpods/p/status"),
            format!("{base}/namespaces/n/boostedpods/{long}"),
            format!("{base}/namespaces/n/boostedpods/%2e"),
            format!("{base}/namespaces//boostedpods"),
        ] {
            assert_eq!(read(&path), Err(Failure::NoSuchPath), "{path}");
        }
    }

    #[test]
    fn nothing_can_be_written() {
        let path = format!("/apis/{API_VERSION}/namespaces/n/boostedpods/p");
        for method in [Method::DELETE, Method::POST, Method::PATCH, Method::PUT] {
            let refused = Route::read(&method, &path);
            assert_eq!(refused, Err(Failure::MethodNotAllowed), "{method}");
        }
    }
}
