//! A page or an object, in the form that was asked for.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use hyper::{Response, header};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    accept::{Form, TABLE},
    object::{ListMeta, Metadata, Object, ObjectList, Row},
    query::{Include, token},
    resource::Resource,
};
use crate::claims::Place;

/// Which replica answers, and from how fresh a cache: keys of annotations.
pub(super) const REPLICA: &str = "visibility.autoscaling.x-k8s.io/replica";
/// Whether it leads.
pub(super) const LEADER: &str = "visibility.autoscaling.x-k8s.io/leader";
/// Seconds since its cache was told something.
pub(super) const CACHE_AGE: &str = "visibility.autoscaling.x-k8s.io/cache-age-seconds";

/// Whence an answer comes.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// Annotations that say so.
    pub(super) annotations: BTreeMap<&'static str, String>,
    /// The newest version in the cache.
    pub(super) version: u64,
}

/// Some objects, in order, and where the next page begins.
pub(super) struct Page<S> {
    pub(super) items: Vec<Object<S>>,
    pub(super) next: Option<Place>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Table<S> {
    kind: &'static str,
    api_version: &'static str,
    metadata: ListMeta,
    column_definitions: Vec<Value>,
    rows: Vec<TableRow<S>>,
}

#[derive(Serialize)]
struct TableRow<S> {
    cells: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<Shown<S>>,
}

/// What a row carries of its object.
#[derive(Serialize)]
#[serde(untagged)]
enum Shown<S> {
    Whole(Object<S>),
    #[serde(rename_all = "camelCase")]
    Partial {
        kind: &'static str,
        api_version: &'static str,
        metadata: Metadata,
    },
}

/// A list.
pub(super) fn list<S: Row + Serialize>(
    resource: Resource,
    page: Page<S>,
    source: Source,
    form: Form,
    include: Include,
    now: DateTime<Utc>,
) -> Response<Vec<u8>> {
    let metadata = ListMeta {
        resource_version: source.version.to_string(),
        token: page.next.as_ref().map(token),
        annotations: source.annotations,
    };
    if form == TABLE {
        return json_response(&table(metadata, page.items, include, now));
    }
    json_response(&ObjectList::new(resource, metadata, page.items))
}

/// One object.
pub(super) fn one<S: Row + Serialize>(
    mut object: Object<S>,
    source: Source,
    form: Form,
    include: Include,
    now: DateTime<Utc>,
) -> Response<Vec<u8>> {
    if form == TABLE {
        let metadata = ListMeta {
            resource_version: source.version.to_string(),
            token: None,
            annotations: source.annotations,
        };
        return json_response(&table(metadata, vec![object], include, now));
    }
    object.metadata.annotations = source.annotations;
    json_response(&object)
}

fn table<S: Row + Serialize>(
    metadata: ListMeta,
    items: Vec<Object<S>>,
    include: Include,
    now: DateTime<Utc>,
) -> Table<S> {
    let column = |name: &str, format: &str, description: &str, is_wide: bool| {
        json!({
            "name": name, "type": "string", "format": format, "description": description,
            "priority": i32::from(is_wide),
        })
    };
    let mut column_definitions = vec![column("Name", "name", "Name of the object", false)];
    let columns = S::COLUMNS.iter();
    column_definitions.extend(columns.map(|(name, text, wide)| column(name, "", text, *wide)));
    let rows = items.into_iter().map(|object| {
        let mut cells = vec![object.metadata.name.clone()];
        cells.extend(object.status.cells(now));
        TableRow {
            cells,
            object: shown(object, include),
        }
    });
    Table {
        kind: "Table",
        api_version: "meta.k8s.io/v1",
        metadata,
        column_definitions,
        rows: rows.collect(),
    }
}

fn shown<S>(object: Object<S>, include: Include) -> Option<Shown<S>> {
    match include {
        Include::None => None,
        Include::Metadata => Some(Shown::Partial {
            kind: "PartialObjectMetadata",
            api_version: "meta.k8s.io/v1",
            metadata: object.metadata,
        }),
        Include::Object => Some(Shown::Whole(object)),
    }
}

/// Any value, as JSON.
pub(super) fn json_response(value: &impl Serialize) -> Response<Vec<u8>> {
    typed_response(value, "application/json")
}

/// The same under another name.
pub(super) fn typed_response(value: &impl Serialize, media_type: &str) -> Response<Vec<u8>> {
    let body = serde_json::to_vec(value).expect("texts and numbers can be written");
    Response::builder()
        .header(header::CONTENT_TYPE, media_type)
        .body(body)
        .expect("a header makes a response")
}
