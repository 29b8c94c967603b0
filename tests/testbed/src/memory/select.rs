//! Label and field selectors.

use serde_json::Value;

use super::store::text;

/// A parsed pair of selectors.
#[derive(Default)]
pub(super) struct Selector {
    labels: Vec<(String, Labels)>,
    fields: Vec<(String, bool, String)>,
}

enum Labels {
    Exists,
    Absent,
    In(Vec<String>),
    NotIn(Vec<String>),
}

// === impl Selector ===

impl Selector {
    /// Reads the two query parameters; the error is the part that makes no sense.
    pub(super) fn parse(labels: &str, fields: &str) -> Result<Self, String> {
        let fields = fields.split(',').filter(|part| !part.is_empty());
        Ok(Self {
            labels: requirements(labels)
                .into_iter()
                .map(label)
                .collect::<Result<_, _>>()?,
            fields: fields.map(field).collect::<Result<_, _>>()?,
        })
    }

    /// Narrows it to one name, for a watch on a single object's path.
    pub(super) fn only(&mut self, name: &str) {
        self.fields
            .push(("metadata.name".to_owned(), true, name.to_owned()));
    }

    pub(super) fn fits(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.labels
            .iter()
            .all(|(key, wanted)| match (wanted, labels[key].as_str()) {
                (Labels::Exists, value) => value.is_some(),
                (Labels::Absent, value) => value.is_none(),
                (Labels::In(values), Some(value)) => values.iter().any(|v| v == value),
                (Labels::NotIn(values), Some(value)) => values.iter().all(|v| v != value),
                (Labels::In(_), None) => false,
                (Labels::NotIn(_), None) => true,
            })
            && self.fields.iter().all(|(path, equal, wanted)| {
                let value = path.split('.').fold(object, |value, part| &value[part]);
                (text(value) == wanted) == *equal
            })
    }
}

/// Splits at the commas outside parentheses.
fn requirements(selector: &str) -> Vec<&str> {
    let mut inside = false;
    let parts = selector.split(|c| {
        inside = c == '(' || inside && c != ')';
        c == ',' && !inside
    });
    parts
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect()
}

fn label(part: &str) -> Result<(String, Labels), String> {
    let list = |values: &str| {
        values
            .split(',')
            .map(|v| v.trim().to_owned())
            .collect::<Vec<_>>()
    };
    let (key, wanted) = if let Some((head, values)) = part.split_once('(') {
        let values = list(values.trim_end().strip_suffix(')').ok_or(part)?);
        match head.trim().rsplit_once(char::is_whitespace) {
            Some((key, "in")) => (key, Labels::In(values)),
            Some((key, "notin")) => (key, Labels::NotIn(values)),
            _ => return Err(part.to_owned()),
        }
    } else if let Some((key, value)) = part.split_once("!=") {
        (key, Labels::NotIn(list(value)))
    } else if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        (key, Labels::In(list(value)))
    } else if let Some(key) = part.strip_prefix('!') {
        (key, Labels::Absent)
    } else {
        (part, Labels::Exists)
    };
    let key = key.trim();
    let sound = !key.is_empty() && !key.contains(char::is_whitespace);
    sound
        .then(|| (key.to_owned(), wanted))
        .ok_or_else(|| part.to_owned())
}

fn field(part: &str) -> Result<(String, bool, String), String> {
    let split = part
        .split_once("!=")
        .map(|(path, value)| (path, false, value));
    let split = split.or_else(|| {
        part.split_once("==")
            .map(|(path, value)| (path, true, value))
    });
    let split = split.or_else(|| {
        part.split_once('=')
            .map(|(path, value)| (path, true, value))
    });
    let (path, equal, value) = split.ok_or(part)?;
    Ok((path.to_owned(), equal, value.to_owned()))
}
