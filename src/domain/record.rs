//! The record: the annotation that says what was lent to a pod and when that ends.
//!
//! It is compact JSON with upstream's fields first, spelled as upstream spells them, so that either operator can take
//! over from the other. It alone is enough to end the boost. Fields that this version doesn't know are kept.

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::{Map, Value};

use super::{
    clamp::Clamp,
    end::{EndRule, EndedBy},
    policy::BoostKind,
    quantity::MilliCpu,
};

/// Largest annotation value that is read, in bytes.
pub const MAX_BYTES: usize = 8 << 10;

/// How long after its record a raise may come.
const RAISE_BEGINS: TimeDelta = TimeDelta::seconds(30);

const STATE: &str = "state";
const TIMESTAMP: &str = "timestamp";
const REQUESTS: Fields = Fields {
    original: "initCPURequests",
    boosted: "boostedCPURequests",
};
const LIMITS: Fields = Fields {
    original: "initCPULimits",
    boosted: "boostedCPULimits",
};
const CLAMPED: &str = "clamped";
const CAUSE: &str = "cause";
const RESTARTS: &str = "restarts";
const BOOST: &str = "boost";
const BOOST_KIND: &str = "boostKind";
const END: &str = "end";
const ENDED_TIMESTAMP: &str = "endedTimestamp";
const ENDED_BY: &str = "endedBy";

/// The two fields in which one kind of value is kept, each a map by container.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Fields {
    original: &'static str,
    boosted: &'static str,
}

/// A record, as read.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Everything that the annotation holds, in its order.
    fields: Map<String, Value>,
    /// Whether the boost is in force.
    pub state: State,
    /// When the boost was made.
    pub timestamp: Option<DateTime<Utc>>,
    /// The object that made it; absent in upstream's records.
    pub boost: Option<BoostRef>,
    /// The end rule as it stood.
    pub end: EndRule,
    /// The deadline as it stood, in seconds.
    pub deadline_seconds: Option<u64>,
    /// What was lent, by container. An entry that can't be read spoils its own container only.
    pub containers: BTreeMap<String, Result<Loan, BadEntry>>,
}

/// The object that made a boost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoostRef {
    /// `None` is a kind of a later version, of which no object is known here.
    pub kind: Option<BoostKind>,
    /// Its name.
    pub name: String,
}

/// Why a pod that runs was boosted. A boost at its creation needs no word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// A container has restarted.
    Restart,
    /// Nobody answered for it when it was created.
    Late,
}

impl Cause {
    /// All of them, for metrics that exist from the start.
    pub const ALL: [Self; 2] = [Self::Restart, Self::Late];

    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Restart => "Restart",
            Self::Late => "Late",
        }
    }
}

/// `state` of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In force. Also upstream's records up to 0.20, which have no state.
    Active,
    /// Ended.
    Reverted,
}

/// What was lent to one container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loan {
    /// Its CPU request, if it had one.
    pub request: Option<LoanValue>,
    /// Its CPU limit, if it had one.
    pub limit: Option<LoanValue>,
}

/// What was lent of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoanValue {
    /// What the pod asked for.
    pub original: MilliCpu,
    /// What it got.
    pub set: Set,
}

/// What a value was set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Set {
    /// Raised to this.
    To(MilliCpu),
    /// Removed (a limit).
    Removed,
    /// Left as it was.
    Untouched,
    /// Not recorded: upstream's records have the originals only.
    Unrecorded,
}

/// A container's entry that can't be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct BadEntry {
    /// The record's field.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: String,
}

/// Why an annotation is no record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Longer than [`MAX_BYTES`].
    #[error("the annotation has {0} bytes, more than the {MAX_BYTES} that are read")]
    TooLong(usize),
    /// Not JSON.
    #[error("the annotation is no JSON: {0}")]
    NotJson(String),
    /// Not an object, or a map in it is none.
    #[error("{0} is not an object")]
    NotAnObject(&'static str),
}

/// What a new record says. As JSON it is the annotation.
#[derive(Clone, Copy, Debug)]
pub struct NewRecord<'a> {
    /// When the boost is made.
    pub timestamp: DateTime<Utc>,
    /// What is lent, by container.
    pub containers: &'a BTreeMap<&'a str, Loan>,
    /// The containers that get less than their policy says, and why.
    pub clamped: &'a BTreeMap<&'a str, Clamp>,
    /// Why a pod that runs is boosted, and how often its containers had restarted by then.
    pub raise: Option<(Cause, &'a BTreeMap<&'a str, i32>)>,
    /// The object that makes it.
    pub boost: (BoostKind, &'a str),
    /// When it ends.
    pub end: &'a EndRule,
    /// The latest, in seconds from scheduling.
    pub deadline_seconds: u64,
}

impl NewRecord<'_> {
    /// The annotation's value.
    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string(self).expect("a map with text for keys can be written")
    }

    /// Writes a map by container, if any container has the value.
    fn write<M: SerializeMap>(
        &self,
        to: &mut M,
        field: &str,
        value_of: impl Fn(&Loan) -> Option<String>,
    ) -> Result<(), M::Error> {
        let containers = self.containers.iter();
        let values = containers.filter_map(|(name, loan)| Some((*name, value_of(loan)?)));
        let values: BTreeMap<&str, String> = values.collect();
        if values.is_empty() {
            return Ok(());
        }
        to.serialize_entry(field, &values)
    }
}

impl Serialize for NewRecord<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry(STATE, "Active")?;
        map.serialize_entry(TIMESTAMP, &time(self.timestamp))?;
        let originals = |value: LoanValue| Some(value.original.to_string());
        self.write(&mut map, REQUESTS.original, |loan| {
            loan.request.and_then(originals)
        })?;
        self.write(&mut map, LIMITS.original, |loan| {
            loan.limit.and_then(originals)
        })?;
        self.write(&mut map, REQUESTS.boosted, |loan| {
            loan.request.and_then(LoanValue::boosted)
        })?;
        self.write(&mut map, LIMITS.boosted, |loan| {
            loan.limit.and_then(LoanValue::boosted)
        })?;
        if !self.clamped.is_empty() {
            let by = self.clamped.iter().map(|(name, by)| (name, by.as_str()));
            map.serialize_entry(CLAMPED, &by.collect::<BTreeMap<_, _>>())?;
        }
        if let Some((cause, restarts)) = self.raise {
            map.serialize_entry(CAUSE, cause.as_str())?;
            map.serialize_entry(RESTARTS, restarts)?;
        }
        let (kind, name) = self.boost;
        map.serialize_entry(BOOST, name)?;
        if kind != BoostKind::Namespaced {
            map.serialize_entry(BOOST_KIND, kind.as_str())?;
        }
        map.serialize_entry(END, &self.end.recorded(self.deadline_seconds))?;
        map.end()
    }
}

impl Record {
    /// Reads an annotation. A doubled key's last value counts; any state but `Reverted` is Active.
    ///
    /// # Errors
    /// When it is no record at all. A bad entry for a container is no error: see [`Record::containers`].
    pub fn read(text: &str) -> Result<Self, RecordError> {
        if text.len() > MAX_BYTES {
            return Err(RecordError::TooLong(text.len()));
        }
        let value: Value =
            serde_json::from_str(text).map_err(|error| RecordError::NotJson(error.to_string()))?;
        let Value::Object(fields) = value else {
            return Err(RecordError::NotAnObject("the annotation"));
        };
        let (end, deadline_seconds) = fields.get(END).map(EndRule::from_json).unwrap_or_default();
        Ok(Self {
            state: match fields.get(STATE).and_then(Value::as_str) {
                Some("Reverted") => State::Reverted,
                _ => State::Active,
            },
            timestamp: fields
                .get(TIMESTAMP)
                .and_then(Value::as_str)
                .and_then(|text| text.parse().ok()),
            boost: read_boost(&fields),
            end,
            deadline_seconds,
            containers: read_containers(&fields)?,
            fields,
        })
    }

    /// The annotation's value.
    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string(&self.fields).expect("a map with text for keys can be written")
    }

    /// The record with these containers' entries in place of what it says of them. All else stays as it was.
    #[must_use]
    pub fn with(&self, containers: &BTreeMap<&str, Loan>) -> Self {
        let mut record = self.clone();
        for (name, loan) in containers {
            for (fields, value) in [(REQUESTS, loan.request), (LIMITS, loan.limit)] {
                let original = value.map(|value| value.original.to_string());
                set(&mut record.fields, fields.original, name, original);
                let boosted = value.and_then(LoanValue::boosted);
                set(&mut record.fields, fields.boosted, name, boosted);
            }
            record.containers.insert((*name).to_owned(), Ok(*loan));
        }
        record
    }

    /// The record of the same boost, still in force, that says what is about to end it: whoever finishes it then says so.
    #[must_use]
    pub fn announcing(&self, by: EndedBy) -> Self {
        let mut record = self.clone();
        record.fields.insert(ENDED_BY.into(), by.as_str().into());
        record
    }

    /// Until when a boost of a running pod (its `cause` is `Restart` or `Late`) may still be about to raise: the record is
    /// written before the resize.
    #[must_use]
    pub fn raise_begins_until(&self) -> Option<DateTime<Utc>> {
        self.cause()?;
        Some(self.timestamp? + RAISE_BEGINS)
    }

    /// Why a pod that runs was boosted; `None` for a boost at its creation.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        let word = self.fields.get(CAUSE)?.as_str()?;
        Cause::ALL.into_iter().find(|cause| cause.as_str() == word)
    }

    /// How often a container had restarted when that was last written; `None` where restarts are not counted.
    #[must_use]
    pub fn restarts(&self, container: &str) -> Option<i64> {
        let counts = self.fields.get(RESTARTS)?.as_object()?;
        Some(counts.get(container).and_then(Value::as_i64).unwrap_or(0))
    }

    /// Whether it says how often containers had restarted: its claim then stays, for the next restart.
    #[must_use]
    pub fn counts_restarts(&self) -> bool {
        self.restarts("").is_some()
    }

    /// The record with these restarts in place of those that it has. All else stays as it was. `None` where it could not be
    /// read again.
    #[must_use]
    pub fn counting<'a>(&self, restarts: impl Iterator<Item = (&'a str, i32)>) -> Option<Self> {
        let mut record = self.clone();
        let counts = restarts.map(|(name, count)| (name.to_owned(), Value::from(count)));
        record
            .fields
            .insert(RESTARTS.into(), counts.collect::<Map<_, _>>().into());
        (record.text().len() <= MAX_BYTES).then_some(record)
    }

    /// What was announced, if anything was.
    #[must_use]
    pub fn announced(&self) -> Option<EndedBy> {
        let word = self.fields.get(ENDED_BY)?.as_str()?;
        EndedBy::ALL.into_iter().find(|by| by.as_str() == word)
    }

    /// The record of the same boost, ended. All else stays as it was.
    #[must_use]
    pub fn ended(&self, by: EndedBy, at: DateTime<Utc>) -> Self {
        let mut record = self.clone();
        record.state = State::Reverted;
        if let Some(state) = record.fields.get_mut(STATE) {
            *state = "Reverted".into();
        } else {
            record
                .fields
                .shift_insert(0, STATE.into(), "Reverted".into());
        }
        record
            .fields
            .insert(ENDED_TIMESTAMP.into(), time(at).into());
        record.fields.insert(ENDED_BY.into(), by.as_str().into());
        record
    }
}

/// Sets or removes a container's entry in one of the four maps.
fn set(fields: &mut Map<String, Value>, map: &str, name: &str, value: Option<String>) {
    match (fields.get_mut(map), value) {
        (Some(Value::Object(map)), Some(value)) => {
            map.insert(name.to_owned(), value.into());
        }
        (Some(Value::Object(map)), None) => {
            map.shift_remove(name);
        }
        (_, Some(value)) => {
            let entries = Map::from_iter([(name.to_owned(), value.into())]);
            fields.insert(map.to_owned(), entries.into());
        }
        (_, None) => {}
    }
}

impl LoanValue {
    /// The record's spelling of what was set, if anything was.
    fn boosted(self) -> Option<String> {
        match self.set {
            Set::To(cpu) => Some(cpu.to_string()),
            Set::Removed => Some(String::new()),
            Set::Untouched | Set::Unrecorded => None,
        }
    }
}

fn read_boost(fields: &Map<String, Value>) -> Option<BoostRef> {
    let name = fields.get(BOOST)?.as_str()?.to_owned();
    let kind = match fields.get(BOOST_KIND) {
        None | Some(Value::Null) => Some(BoostKind::Namespaced),
        Some(kind) => kind.as_str().and_then(BoostKind::named),
    };
    Some(BoostRef { kind, name })
}

fn time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

fn read_containers(
    fields: &Map<String, Value>,
) -> Result<BTreeMap<String, Result<Loan, BadEntry>>, RecordError> {
    let requests = Values::read(fields, REQUESTS)?;
    let limits = Values::read(fields, LIMITS)?;
    let recorded = requests.boosted.is_some() || limits.boosted.is_some();
    let unchanged = if recorded {
        Set::Untouched
    } else {
        Set::Unrecorded
    };
    let loan = |name: &String| {
        Ok(Loan {
            request: requests.of(name, unchanged)?,
            limit: limits.of(name, unchanged)?,
        })
    };
    let names = [requests.original, limits.original]
        .into_iter()
        .flatten()
        .flat_map(Map::keys);
    Ok(names.map(|name| (name.clone(), loan(name))).collect())
}

/// One kind of value, as a record has it.
struct Values<'a> {
    fields: Fields,
    original: Option<&'a Map<String, Value>>,
    boosted: Option<&'a Map<String, Value>>,
}

impl<'a> Values<'a> {
    fn read(record: &'a Map<String, Value>, fields: Fields) -> Result<Self, RecordError> {
        let map = |field: &'static str| match record.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(_) => Err(RecordError::NotAnObject(field)),
        };
        Ok(Self {
            fields,
            original: map(fields.original)?,
            boosted: map(fields.boosted)?,
        })
    }

    /// What it says of a container.
    fn of(&self, name: &str, unchanged: Set) -> Result<Option<LoanValue>, BadEntry> {
        let Some(original) = self.original.and_then(|map| map.get(name)) else {
            return Ok(None);
        };
        let original = cpu(self.fields.original, original)?;
        let set = match self.boosted.and_then(|map| map.get(name)) {
            None => unchanged,
            // Nobody removes a request.
            Some(Value::String(text)) if text.is_empty() && self.fields == LIMITS => Set::Removed,
            Some(value) => Set::To(cpu(self.fields.boosted, value)?),
        };
        Ok(Some(LoanValue { original, set }))
    }
}

fn cpu(field: &'static str, value: &Value) -> Result<MilliCpu, BadEntry> {
    let bad = |problem| BadEntry { field, problem };
    let text = value
        .as_str()
        .ok_or_else(|| bad(format!("{value} is no string")))?;
    text.parse()
        .map_err(|error| bad(format!("{text:?} is {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by the fuzz target `record`: a number in an unknown field changed each time it was written.
    #[test]
    fn numbers_in_unknown_fields_are_kept() {
        let text = r#"{"new":{"count":259200184467440737095516150,"share":0.1}}"#;
        let once = Record::read(text).expect("a record").text();
        let twice = Record::read(&once).expect("a record").text();
        assert_eq!(once, twice);
    }

    /// Found by `no_record_raises_what_counts_as_the_original`.
    #[test]
    fn a_request_can_not_have_been_removed() {
        let text = r#"{"initCPURequests":{"app":"10m"},"boostedCPURequests":{"app":""}}"#;
        let record = Record::read(text).expect("a record");
        assert!(record.containers["app"].is_err());
        let text = r#"{"initCPULimits":{"app":"10m"},"boostedCPULimits":{"app":""}}"#;
        let record = Record::read(text).expect("a record");
        let loan = record.containers["app"].as_ref().expect("it is read");
        assert_eq!(loan.limit.map(|limit| limit.set), Some(Set::Removed));
    }
}
