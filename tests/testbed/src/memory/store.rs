//! The objects, and every change to them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

/// A resource type.
#[derive(Debug)]
pub(super) struct Kind {
    pub(super) group: &'static str,
    pub(super) version: &'static str,
    pub(super) plural: &'static str,
    pub(super) name: &'static str,
    pub(super) namespaced: bool,
    /// Whether it has a `status` subresource.
    pub(super) status: bool,
}

const fn kind(
    [group, version, plural, name]: [&'static str; 4],
    namespaced: bool,
    status: bool,
) -> Kind {
    Kind {
        group,
        version,
        plural,
        name,
        namespaced,
        status,
    }
}

/// Both `events` share their objects, as on a real server (though nothing is converted here).
#[rustfmt::skip]
const KINDS: &[Kind] = &[
    kind(["", "v1", "pods", "Pod"], true, true),
    kind(["", "v1", "events", "Event"], true, false),
    kind(["events.k8s.io", "v1", "events", "Event"], true, false),
    kind(["coordination.k8s.io", "v1", "leases", "Lease"], true, false),
    kind(["", "v1", "secrets", "Secret"], true, false),
    kind(["", "v1", "configmaps", "ConfigMap"], true, false),
    kind(["", "v1", "services", "Service"], true, true),
    kind(["", "v1", "namespaces", "Namespace"], false, true),
    kind(["", "v1", "nodes", "Node"], false, true),
    kind(["", "v1", "limitranges", "LimitRange"], true, false),
    kind(["", "v1", "resourcequotas", "ResourceQuota"], true, true),
    kind(["apps", "v1", "deployments", "Deployment"], true, true),
    kind(["apps", "v1", "replicasets", "ReplicaSet"], true, true),
    kind(["apps", "v1", "statefulsets", "StatefulSet"], true, true),
    kind(["apps", "v1", "daemonsets", "DaemonSet"], true, true),
    kind(["batch", "v1", "jobs", "Job"], true, true),
    kind(["admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration"], false, false),
    kind(["apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"], false, true),
    kind(["apiregistration.k8s.io", "v1", "apiservices", "APIService"], false, true),
    kind([BOOSTS, "v1alpha1", "startupcpuboosts", "StartupCPUBoost"], true, true),
    kind([BOOSTS, "v1alpha1", "clusterstartupcpuboosts", "ClusterStartupCPUBoost"], false, true),
];

const BOOSTS: &str = "autoscaling.x-k8s.io";

/// Where an object is kept.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Key {
    pub(super) plural: &'static str,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// One change: an object before and after. After a deletion `new` is absent.
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) key: Key,
    pub(super) old: Option<Value>,
    pub(super) new: Option<Value>,
}

#[derive(Default)]
pub(super) struct Store {
    objects: BTreeMap<Key, Value>,
    history: Vec<Change>,
    /// The newest version whose change is forgotten.
    compacted: u64,
    pub(super) version: u64,
    serial: u64,
    /// Plurals of types that are not served.
    pub(super) absent: BTreeSet<&'static str>,
}

// === impl Kind ===

impl Kind {
    /// The type of a request's path.
    pub(super) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Self> {
        let fits = |k: &&Self| k.group == group && k.version == version && k.plural == plural;
        KINDS.iter().find(fits)
    }

    /// The type of an object.
    pub(super) fn of(object: &Value) -> Option<&'static Self> {
        let fits = |k: &&Self| object["kind"] == k.name && object["apiVersion"] == k.api_version();
        KINDS.iter().find(fits)
    }

    /// The type that a test names by its plural.
    pub(super) fn named(plural: &str) -> &'static Self {
        let found = KINDS.iter().find(|k| k.plural == plural);
        found.unwrap_or_else(|| panic!("the in-memory server knows no {plural}"))
    }

    pub(super) fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// Whether a CRD defines it.
    pub(super) fn custom(&self) -> bool {
        self.group == BOOSTS
    }

    pub(super) fn key(&self, namespace: &str, name: &str) -> Key {
        let namespace = if self.namespaced { namespace } else { "" };
        Key {
            plural: self.plural,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }
}

// === impl Store ===

impl Store {
    pub(super) fn get(&self, key: &Key) -> Option<&Value> {
        self.objects.get(key)
    }

    /// The objects of a type, by namespace and name.
    pub(super) fn current(&self, plural: &'static str) -> impl Iterator<Item = (&Key, &Value)> {
        let first = Key {
            plural,
            namespace: String::new(),
            name: String::new(),
        };
        self.objects
            .range(first..)
            .take_while(move |(key, _)| key.plural == plural)
    }

    /// The objects of a type as they were at a version, if that is still known.
    pub(super) fn snapshot(
        &self,
        plural: &'static str,
        version: u64,
    ) -> Option<BTreeMap<&Key, &Value>> {
        let mut then: BTreeMap<_, _> = self.current(plural).collect();
        for change in self
            .since(version)?
            .iter()
            .rev()
            .filter(|c| c.key.plural == plural)
        {
            match &change.old {
                Some(old) => then.insert(&change.key, old),
                None => then.remove(&change.key),
            };
        }
        Some(then)
    }

    /// The changes after a version, or none if some of them are forgotten.
    pub(super) fn since(&self, version: u64) -> Option<&[Change]> {
        let first = self
            .history
            .partition_point(|change| change.version <= version);
        (version >= self.compacted).then(|| &self.history[first..])
    }

    pub(super) fn compact(&mut self) {
        self.history.clear();
        self.compacted = self.version;
    }

    /// What [`create`](Self::create) would store.
    pub(super) fn prepare(
        &mut self,
        kind: &'static Kind,
        mut object: Value,
        now: &str,
    ) -> (Key, Value) {
        self.serial += 1;
        let serial = self.serial;
        object["apiVersion"] = kind.api_version().into();
        object["kind"] = kind.name.into();
        let meta = metadata(&mut object);
        if kind.namespaced {
            meta.entry("namespace").or_insert_with(|| "default".into());
        }
        let prefix = meta
            .get("generateName")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let generated = format!("{prefix}{serial:05x}");
        meta.entry("name").or_insert_with(|| generated.into());
        meta.entry("uid")
            .or_insert_with(|| format!("00000000-0000-4000-8000-{serial:012x}").into());
        meta.entry("generation").or_insert_with(|| 1.into());
        meta.entry("creationTimestamp")
            .or_insert_with(|| now.into());
        let key = kind.key(
            text(&object["metadata"]["namespace"]),
            text(&object["metadata"]["name"]),
        );
        if kind.plural == "namespaces" {
            object["metadata"]["labels"]["kubernetes.io/metadata.name"] = key.name.clone().into();
        }
        (key, object)
    }

    /// Stores a new object, and its Namespace if that is new; an occupied key is the error.
    pub(super) fn create(
        &mut self,
        kind: &'static Kind,
        object: Value,
        now: &str,
    ) -> Result<Value, Key> {
        let (key, object) = self.prepare(kind, object, now);
        if self.objects.contains_key(&key) {
            return Err(key);
        }
        let namespaces = Kind::named("namespaces");
        if kind.namespaced && self.get(&namespaces.key("", &key.namespace)).is_none() {
            let namespace =
                json!({"metadata": {"name": key.namespace}, "status": {"phase": "Active"}});
            let (key, namespace) = self.prepare(namespaces, namespace, now);
            self.put(key, namespace);
        }
        Ok(self.put(key, object))
    }

    /// Stores an object in the place of an older one. A changed spec raises the generation; no change is no write.
    pub(super) fn replace(&mut self, key: Key, mut object: Value) -> Value {
        let old = self
            .objects
            .get(&key)
            .expect("the object to replace exists");
        raise_generation(old, &mut object);
        if *old == object {
            object
        } else {
            self.put(key, object)
        }
    }

    pub(super) fn remove(&mut self, key: &Key) -> Option<Value> {
        let old = self.objects.remove(key)?;
        self.version += 1;
        let change = Change {
            version: self.version,
            key: key.clone(),
            old: Some(old.clone()),
            new: None,
        };
        self.history.push(change);
        Some(old)
    }

    pub(super) fn remove_kind(&mut self, kind: &'static Kind) {
        let keys: Vec<_> = self
            .current(kind.plural)
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            self.remove(&key);
        }
        self.absent.insert(kind.plural);
    }

    fn put(&mut self, key: Key, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let old = self.objects.insert(key.clone(), object.clone());
        self.history.push(Change {
            version: self.version,
            key,
            old,
            new: Some(object.clone()),
        });
        object
    }
}

/// Sets an object's generation to one more than the old one's if anything but metadata and status differs.
pub(super) fn raise_generation(old: &Value, new: &mut Value) {
    let spec = |object: &Value| {
        let mut object = object.as_object().cloned().unwrap_or_default();
        object.retain(|field, _| !matches!(field.as_str(), "metadata" | "status"));
        object
    };
    if spec(old) != spec(new) {
        let generation = old["metadata"]["generation"].as_u64().unwrap_or_default();
        new["metadata"]["generation"] = (generation + 1).into();
    }
}

/// Marks an object as terminating.
pub(super) fn terminate(object: &mut Value, now: &str) {
    let meta = metadata(object);
    if !meta.contains_key("deletionTimestamp") {
        let generation = meta
            .get("generation")
            .and_then(Value::as_u64)
            .unwrap_or_default();
        meta.insert("deletionTimestamp".to_owned(), now.into());
        meta.insert("deletionGracePeriodSeconds".to_owned(), 30.into());
        meta.insert("generation".to_owned(), (generation + 1).into());
    }
}

/// An object's metadata, made if need be.
pub(super) fn metadata(object: &mut Value) -> &mut Map<String, Value> {
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    object["metadata"].as_object_mut().expect("just made sure")
}

/// A string, or the empty one.
pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
