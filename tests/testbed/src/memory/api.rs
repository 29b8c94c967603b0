//! Routes, verbs, preconditions and refusals.

use std::collections::BTreeMap;

use http::{HeaderMap, header, request::Parts};
use serde_json::{Map, Value, json};

use super::{
    Recorded, Reply, State, json_reply, patch, pod,
    select::Selector,
    store::{self, Key, Kind, Store, text},
    watch,
};
use crate::request::{self, Resource};

/// A request, taken apart.
pub(super) struct Call {
    verb: &'static str,
    path: String,
    query: BTreeMap<String, String>,
    content_type: Option<String>,
    body: Option<Value>,
    /// Whether the client wants `PartialObjectMetadata`.
    metadata_only: bool,
    target: Option<Target>,
}

/// What a path names.
#[derive(Clone)]
struct Target {
    kind: &'static Kind,
    namespace: Option<String>,
    name: Option<String>,
    subresource: Option<String>,
}

pub(super) enum Answer {
    Object(u16, Value),
    Watch(watch::Request),
}

/// A failure on its way to a `metav1.Status`.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    code: u16,
    reason: String,
    message: String,
    details: Box<Map<String, Value>>,
    pub(crate) retry_after: Option<u64>,
}

// === impl Call ===

impl Call {
    pub(super) fn new(head: &Parts, body: &[u8]) -> Self {
        let header = |name| head.headers.get(name)?.to_str().ok();
        let query = head.uri.query().unwrap_or_default();
        let verb = request::verb(&head.method, head.uri.path(), query);
        let query = form_urlencoded::parse(query.as_bytes());
        let query = query.into_owned().collect();
        let target = Target::parse(head.uri.path());
        Self {
            verb,
            path: head.uri.path().to_owned(),
            query,
            content_type: header(header::CONTENT_TYPE).map(str::to_owned),
            body: serde_json::from_slice(body).ok(),
            metadata_only: header(header::ACCEPT)
                .is_some_and(|v| v.contains("as=PartialObjectMetadata")),
            target,
        }
    }

    pub(super) fn recorded(&self, who: String, at: std::time::Duration) -> Recorded {
        Recorded {
            at,
            who,
            verb: self.verb,
            path: self.path.clone(),
            query: self.query.clone(),
            content_type: self.content_type.clone(),
            body: self.body.clone(),
            status: 0,
        }
    }

    /// Whether it may have changed the store.
    pub(super) fn changes(&self) -> bool {
        !matches!(self.verb, "GET" | "LIST" | "WATCH") && !self.dry_run()
    }

    /// The namespace and name of the pod that it resized.
    pub(super) fn resized(&self) -> Option<(String, String)> {
        let target = self
            .target
            .as_ref()
            .filter(|t| t.subresource.as_deref() == Some("resize"))?;
        self.changes()
            .then(|| target.namespace.clone().zip(target.name.clone()))?
    }

    fn dry_run(&self) -> bool {
        self.param("dryRun") == "All"
    }

    fn param(&self, name: &str) -> &str {
        self.query.get(name).map_or("", String::as_str)
    }

    fn body(&self) -> Result<&Value, Refusal> {
        let object = self
            .body
            .as_ref()
            .filter(|body| body.is_object() || body.is_array());
        object.ok_or_else(|| Refusal::bad_request("the body is no JSON object"))
    }

    fn selector(&self) -> Result<Selector, Refusal> {
        Selector::parse(self.param("labelSelector"), self.param("fieldSelector"))
            .map_err(|part| Refusal::bad_request(format!("unable to parse requirement: {part:?}")))
    }
}

// === impl Target ===

impl Target {
    fn parse(path: &str) -> Option<Self> {
        let resource = Resource::parse(path)?;
        Some(Self {
            kind: Kind::find(resource.group, resource.version, resource.plural)?,
            namespace: resource.namespace.map(str::to_owned),
            name: resource.name.map(str::to_owned),
            subresource: resource.subresource.map(str::to_owned),
        })
    }

    fn key(&self) -> Key {
        let (namespace, name) = (self.namespace.as_deref(), self.name.as_deref());
        self.kind
            .key(namespace.unwrap_or_default(), name.unwrap_or_default())
    }
}

// === the verbs ===

/// Answers a request.
pub(super) fn answer(state: &mut State, now: &str, call: &Call) -> Result<Answer, Refusal> {
    if call.path == "/version" {
        return Ok(Answer::Object(200, version(&state.version)));
    }
    let served = |target: &&Target| {
        let subresource = match target.subresource.as_deref() {
            None => true,
            Some("status") => target.kind.status,
            Some("resize") => target.kind.plural == "pods",
            Some(_) => false,
        };
        subresource && !state.store.absent.contains(target.kind.plural)
    };
    let target = call.target.as_ref().filter(served).ok_or_else(|| {
        Refusal::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
    })?;
    let (code, object) = match (call.verb, &target.name, &target.subresource) {
        ("WATCH", ..) => return watch(state, call, target),
        ("LIST", ..) => (200, list(&state.store, call, target)?),
        ("GET", Some(_), _) => (200, existing(&state.store, target)?.clone()),
        ("POST", None, _) => (
            201,
            create(&mut state.store, now, call, target, call.body()?.clone())?,
        ),
        ("PUT" | "PATCH", Some(_), _) => write(&mut state.store, now, call, target)?,
        ("DELETE", Some(_), None) => (200, delete(state, now, call, target)?),
        _ => {
            let message = "the server does not allow this method on the requested resource";
            return Err(Refusal::new(405, "MethodNotAllowed", message));
        }
    };
    let whole = call.verb == "LIST" || !call.metadata_only;
    Ok(Answer::Object(
        code,
        if whole {
            object
        } else {
            metadata_only(&object)
        },
    ))
}

fn list(store: &Store, call: &Call, target: &Target) -> Result<Value, Refusal> {
    let selector = call.selector()?;
    let limit = call
        .param("limit")
        .parse()
        .ok()
        .filter(|n| *n > 0)
        .unwrap_or(usize::MAX);
    // A token is the version of the first page and the last key of this one.
    let (version, after) = match call.param("continue") {
        "" => (store.version, None),
        token => {
            let token: (u64, String, String) = serde_json::from_str(token)
                .map_err(|_| Refusal::bad_request("continue key is not valid"))?;
            (token.0, Some((token.1, token.2)))
        }
    };
    let objects = store
        .snapshot(target.kind.plural, version)
        .ok_or_else(|| Refusal::expired(version, store))?;
    let after = after.map(|(namespace, name)| target.kind.key(&namespace, &name));
    let mut fitting = objects.into_iter().filter(|(key, object)| {
        after.as_ref().is_none_or(|after| *key > after)
            && target
                .namespace
                .as_ref()
                .is_none_or(|namespace| key.namespace == *namespace)
            && selector.fits(object)
    });

    let page: Vec<_> = fitting.by_ref().take(limit).collect();
    let left = fitting.count();
    let mut meta = json!({"resourceVersion": version.to_string()});
    if let (Some((last, _)), true) = (page.last(), left > 0) {
        meta["continue"] = json!([version, last.namespace, last.name])
            .to_string()
            .into();
        meta["remainingItemCount"] = left.into();
    }
    let items: Vec<_> = page
        .into_iter()
        .map(|(_, object)| item(call, target.kind, object))
        .collect();
    Ok(if call.metadata_only {
        json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": meta, "items": items})
    } else {
        let (version, kind) = (
            target.kind.api_version(),
            format!("{}List", target.kind.name),
        );
        json!({"apiVersion": version, "kind": kind, "metadata": meta, "items": items})
    })
}

/// An object as lists hold it: built-in types have no `kind` and `apiVersion` there.
fn item(call: &Call, kind: &Kind, object: &Value) -> Value {
    let mut object = if call.metadata_only {
        metadata_only(object)
    } else {
        object.clone()
    };
    if let (false, false, Some(fields)) =
        (call.metadata_only, kind.custom(), object.as_object_mut())
    {
        fields.retain(|field, _| !matches!(field.as_str(), "kind" | "apiVersion"));
    }
    object
}

fn watch(state: &State, call: &Call, target: &Target) -> Result<Answer, Refusal> {
    let mut selector = call.selector()?;
    if let Some(name) = &target.name {
        selector.only(name);
    }
    let version = match call.param("resourceVersion") {
        "" | "0" => None,
        version => Some(
            version
                .parse()
                .map_err(|_| Refusal::bad_request("invalid resource version"))?,
        ),
    };
    Ok(Answer::Watch(watch::Request {
        kind: target.kind,
        namespace: target.namespace.clone(),
        selector,
        metadata_only: call.metadata_only,
        version,
        initial_events: call.param("sendInitialEvents") == "true",
        bookmarks: call.param("allowWatchBookmarks") == "true",
        timeout: call
            .param("timeoutSeconds")
            .parse()
            .ok()
            .filter(|seconds| *seconds > 0),
        epoch: state.epoch,
    }))
}

fn create(
    store: &mut Store,
    now: &str,
    call: &Call,
    target: &Target,
    mut object: Value,
) -> Result<Value, Refusal> {
    let meta = store::metadata(&mut object);
    let given = |field: &str| meta.get(field).map_or("", text).to_owned();
    if !given("resourceVersion").is_empty() {
        return Err(Refusal::bad_request(
            "resourceVersion should not be set on objects to be created",
        ));
    }
    if given("name").is_empty() && given("generateName").is_empty() {
        let message = "Required value: name or generateName is required";
        return Err(Refusal::invalid(
            target.kind,
            "",
            "metadata.name",
            "FieldValueRequired",
            message,
        ));
    }
    if let Some(namespace) = &target.namespace {
        if !given("namespace").is_empty() && given("namespace") != *namespace {
            let message = "the namespace of the provided object does not match the namespace sent on the request";
            return Err(Refusal::bad_request(message));
        }
        meta.insert("namespace".to_owned(), namespace.clone().into());
    }
    for field in [
        "uid",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
    ] {
        meta.remove(field);
    }
    if let (true, Some(fields)) = (target.kind.status, object.as_object_mut()) {
        fields.remove("status");
    }
    if target.kind.plural == "pods" {
        let ranges = namespaced(store, "limitranges", target.namespace.as_deref());
        pod::add_limit_range_defaults(&mut object, ranges);
        object["status"] = pod::first_status(&object);
    }
    let exists = |key: &Key| {
        let message = format!("{} {:?} already exists", qualified(target.kind), key.name);
        Refusal::new(409, "AlreadyExists", message).about(target.kind, &key.name)
    };
    if call.dry_run() {
        let (key, object) = store.prepare(target.kind, object, now);
        return if store.get(&key).is_some() {
            Err(exists(&key))
        } else {
            Ok(object)
        };
    }
    store
        .create(target.kind, object, now)
        .map_err(|key| exists(&key))
}

/// PUT and PATCH, of the object or a subresource.
fn write(
    store: &mut Store,
    now: &str,
    call: &Call,
    target: &Target,
) -> Result<(u16, Value), Refusal> {
    let kind = target.kind;
    let applied = call.content_type.as_deref() == Some("application/apply-patch+yaml");
    let old = match existing(store, target) {
        Ok(old) => old.clone(),
        Err(_) if applied && target.subresource.is_none() => {
            let mut whole = call.body()?.clone();
            whole["metadata"]["name"] = target.name.clone().into();
            return Ok((201, create(store, now, call, target, whole)?));
        }
        Err(refusal) => return Err(refusal),
    };
    let mut wanted = if call.verb == "PUT" {
        call.body()?.clone()
    } else {
        let content_type = call.content_type.as_deref().unwrap_or_default();
        patch::apply(content_type, kind.custom(), &old, call.body()?)?
    };
    check_metadata(call, kind, &old, &wanted)?;

    let mut new = match target.subresource.as_deref() {
        Some("resize") => {
            let ranges = namespaced(store, "limitranges", target.namespace.as_deref());
            pod::add_limit_range_defaults(&mut wanted, ranges);
            pod::resize(&old, &wanted)?
        }
        Some(_) => {
            let mut new = old.clone();
            new["status"] = wanted["status"].take();
            if !kind.custom() {
                for field in ["labels", "annotations"] {
                    new["metadata"][field] = wanted["metadata"][field].take();
                }
            }
            new
        }
        None => {
            if kind.status {
                wanted["status"] = old["status"].clone();
            }
            if kind.plural == "pods" {
                pod::check_update(&old, &wanted)?;
            }
            wanted
        }
    };
    keep_server_fields(kind, &old, &mut new);
    if call.dry_run() {
        store::raise_generation(&old, &mut new);
        return Ok((200, new));
    }
    Ok((200, store.replace(target.key(), new)))
}

/// Name, uid and resourceVersion of a write.
fn check_metadata(
    call: &Call,
    kind: &'static Kind,
    old: &Value,
    wanted: &Value,
) -> Result<(), Refusal> {
    let (old, new) = (&old["metadata"], &wanted["metadata"]);
    let name = text(&old["name"]);
    let differs = |field: &str| !text(&new[field]).is_empty() && new[field] != old[field];
    if differs("name") || differs("namespace") {
        return Err(Refusal::bad_request(
            "the name of the object does not match the name on the URL",
        ));
    }
    if differs("uid") && call.verb == "PUT" {
        let uids = (text(&new["uid"]), text(&old["uid"]));
        let message = format!(
            "Precondition failed: UID in precondition: {}, UID in object meta: {}",
            uids.0, uids.1
        );
        return Err(Refusal::conflict(kind, name, &message));
    }
    if differs("resourceVersion") {
        let message = "the object has been modified; please apply your changes to the latest version and try again";
        return Err(Refusal::conflict(kind, name, message));
    }
    if differs("uid") {
        let message = format!("Invalid value: {:?}: field is immutable", text(&new["uid"]));
        return Err(Refusal::invalid(
            kind,
            name,
            "metadata.uid",
            "FieldValueInvalid",
            &message,
        ));
    }
    let conditional =
        kind.custom() || kind.plural == "leases" || kind.group.ends_with("registration.k8s.io");
    if call.verb == "PUT" && conditional && text(&new["resourceVersion"]).is_empty() {
        let message = "Invalid value: 0: must be specified for an update";
        return Err(Refusal::invalid(
            kind,
            name,
            "metadata.resourceVersion",
            "FieldValueInvalid",
            message,
        ));
    }
    Ok(())
}

/// Puts back what a client cannot change.
fn keep_server_fields(kind: &Kind, old: &Value, new: &mut Value) {
    new["apiVersion"] = kind.api_version().into();
    new["kind"] = kind.name.into();
    let meta = store::metadata(new);
    for field in [
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ] {
        match old["metadata"].get(field) {
            Some(value) => drop(meta.insert(field.to_owned(), value.clone())),
            None => drop(meta.remove(field)),
        }
    }
    // As Go writes it: an empty map is no map.
    meta.retain(|_, value| !value.is_null() && value.as_object().is_none_or(|map| !map.is_empty()));
    if let (true, Some(fields)) = (new["status"].is_null(), new.as_object_mut()) {
        fields.remove("status");
    }
}

fn delete(state: &mut State, now: &str, call: &Call, target: &Target) -> Result<Value, Refusal> {
    let old = existing(&state.store, target)?.clone();
    let name = text(&old["metadata"]["name"]);
    let options = call.body.as_ref().unwrap_or(&Value::Null);
    for (field, word) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
        let (wanted, have) = (
            text(&options["preconditions"][field]),
            text(&old["metadata"][field]),
        );
        if !wanted.is_empty() && wanted != have {
            let message = format!(
                "Precondition failed: {word} in precondition: {wanted}, {word} in object meta: {have}"
            );
            return Err(Refusal::conflict(target.kind, name, &message));
        }
    }
    let bound = target.kind.plural == "pods" && !old["spec"]["nodeName"].is_null();
    if state.graceful && bound && options["gracePeriodSeconds"] != 0 {
        let mut dying = old;
        store::terminate(&mut dying, now);
        return Ok(if call.dry_run() {
            dying
        } else {
            state.store.replace(target.key(), dying)
        });
    }
    if !call.dry_run() {
        state.store.remove(&target.key());
    }
    let details = json!({"name": name, "group": target.kind.group, "kind": target.kind.plural,
        "uid": old["metadata"]["uid"]});
    Ok(
        json!({"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success", "details": details}),
    )
}

fn existing<'a>(store: &'a Store, target: &Target) -> Result<&'a Value, Refusal> {
    let key = target.key();
    store.get(&key).ok_or_else(|| {
        let message = format!("{} {:?} not found", qualified(target.kind), key.name);
        Refusal::new(404, "NotFound", message).about(target.kind, &key.name)
    })
}

fn namespaced<'a>(
    store: &'a Store,
    plural: &'static str,
    namespace: Option<&'a str>,
) -> impl Iterator<Item = &'a Value> {
    let objects = store
        .current(plural)
        .filter(move |(key, _)| Some(key.namespace.as_str()) == namespace);
    objects.map(|(_, object)| object)
}

/// An object as `PartialObjectMetadata`.
pub(super) fn metadata_only(object: &Value) -> Value {
    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": object["metadata"]})
}

fn version(version: &str) -> Value {
    let mut parts = version.split('.');
    json!({
        "major": parts.next(), "minor": parts.next(), "gitVersion": format!("v{version}"), "gitCommit": "",
        "gitTreeState": "clean", "buildDate": "2026-01-01T00:00:00Z", "goVersion": "go1.25", "compiler": "gc",
        "platform": "linux/amd64",
    })
}

/// `pods`, `leases.coordination.k8s.io`.
fn qualified(kind: &Kind) -> String {
    if kind.group.is_empty() {
        kind.plural.to_owned()
    } else {
        format!("{}.{}", kind.plural, kind.group)
    }
}

// === impl Refusal ===

impl Refusal {
    pub(crate) fn new(code: u16, reason: &str, message: impl Into<String>) -> Self {
        let (reason, message) = (reason.to_owned(), message.into());
        Self {
            code,
            reason,
            message,
            details: Box::default(),
            retry_after: None,
        }
    }

    pub(crate) fn too_many_requests() -> Self {
        let message = "too many requests, please try again later";
        Self::new(429, "TooManyRequests", message)
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 422 for one field.
    pub(super) fn invalid(
        kind: &Kind,
        name: &str,
        field: &str,
        reason: &str,
        message: &str,
    ) -> Self {
        let whole = format!("{} {name:?} is invalid: {field}: {message}", kind.name);
        let mut refusal = Self::new(422, "Invalid", whole).about(kind, name);
        let cause = json!([{"reason": reason, "message": message, "field": field}]);
        refusal.details.insert("kind".to_owned(), kind.name.into());
        refusal.details.insert("causes".to_owned(), cause);
        refusal
    }

    /// 410 for a version of which too much is forgotten.
    pub(super) fn expired(version: u64, store: &Store) -> Self {
        Self::new(
            410,
            "Expired",
            format!("too old resource version: {version} ({})", store.version),
        )
    }

    fn conflict(kind: &Kind, name: &str, message: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} {name:?}: {message}",
            qualified(kind)
        );
        Self::new(409, "Conflict", message).about(kind, name)
    }

    fn about(mut self, kind: &Kind, name: &str) -> Self {
        for (field, value) in [("name", name), ("group", kind.group), ("kind", kind.plural)] {
            if !value.is_empty() {
                self.details.insert(field.to_owned(), value.into());
            }
        }
        self
    }

    /// The `metav1.Status`.
    pub(super) fn status(&self) -> Value {
        let mut details = self.details.clone();
        if let Some(seconds) = self.retry_after {
            details.insert("retryAfterSeconds".to_owned(), seconds.into());
        }
        json!({
            "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "details": details, "code": self.code,
        })
    }

    pub(crate) fn reply(&self) -> Reply {
        let mut headers = HeaderMap::new();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        json_reply(self.code, &self.status(), headers)
    }
}
