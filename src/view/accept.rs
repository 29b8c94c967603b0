//! `Accept`: which of the forms that we have a client likes best (RFC 9110, 12.5.1, with Kubernetes' parameters).

use hyper::HeaderMap;

/// More than any client sends.
const MOST_RANGES: usize = 32;

/// One media range.
#[derive(Clone, Debug, Default, PartialEq)]
struct Range<'a> {
    kind: &'a str,
    /// `as`, `g` and `v`: what the client would have it turned into.
    form: [Option<&'a str>; 3],
    quality: f32,
}

/// Whether an object is wanted as it is, or turned into something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// JSON as it is.
    Plain,
    /// JSON turned into this: `as`, `g` and `v`.
    As([&'static str; 3]),
}

/// `Table`, which kubectl asks for.
pub(super) const TABLE: Form = Form::As(["Table", "meta.k8s.io", "v1"]);
/// All of a group's discovery in one document.
pub(super) const DISCOVERY: Form = Form::As(["APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2"]);

/// The form that the client likes best of those that we have; without a header it takes any, which is the first.
pub(super) fn negotiate(headers: &HeaderMap, have: &[Form]) -> Option<Form> {
    let mut values = headers.get_all(hyper::header::ACCEPT).iter().peekable();
    if values.peek().is_none() {
        return have.first().copied();
    }
    let values: Vec<&str> = values.filter_map(|value| value.to_str().ok()).collect();
    choose(&values.join(","), have)
}

fn choose(accept: &str, have: &[Form]) -> Option<Form> {
    let ranges = accept.split(',').take(MOST_RANGES).filter_map(read);
    let mut best: Option<(Form, f32)> = None;
    for range in ranges {
        let form = have.iter().find(|form| range.takes(**form));
        if let Some(form) = form
            && range.quality > best.map_or(0.0, |(_, quality)| quality)
        {
            best = Some((*form, range.quality));
        }
    }
    best.map(|(form, _)| form)
}

fn read(text: &str) -> Option<Range<'_>> {
    let mut parts = text.split(';').map(str::trim);
    let mut range = Range {
        kind: parts.next()?,
        form: [None; 3],
        quality: 1.0,
    };
    for part in parts {
        let (key, value) = part.split_once('=')?;
        match key.trim() {
            "q" => {
                let quality = value.trim().parse().ok();
                range.quality = quality.filter(|q| (0.0..=1.0).contains(q))?;
            }
            "as" => range.form[0] = Some(value),
            "g" => range.form[1] = Some(value),
            "v" => range.form[2] = Some(value),
            // A character set and the like make no difference.
            _ => {}
        }
    }
    Some(range)
}

impl Range<'_> {
    fn takes(&self, form: Form) -> bool {
        let is_json = matches!(self.kind, "application/json" | "application/*" | "*/*");
        is_json
            && match form {
                Form::Plain => self.form == [None; 3],
                Form::As(wanted) => self.form == wanted.map(Some),
            }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HAVE: [Form; 2] = [Form::Plain, TABLE];
    const KUBECTL: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";

    #[test]
    fn the_first_of_the_best_is_chosen() {
        for (accept, form) in [
            (KUBECTL, Some(TABLE)),
            ("application/json", Some(Form::Plain)),
            (" application/json ; charset=utf-8", Some(Form::Plain)),
            ("*/*", Some(Form::Plain)),
            ("application/*;q=0.1", Some(Form::Plain)),
            ("text/html, */*;q=0.8", Some(Form::Plain)),
            (
                "application/json;q=0.5,application/json;as=Table;g=meta.k8s.io;v=v1",
                Some(TABLE),
            ),
            (
                "application/json;as=Table;g=meta.k8s.io;v=v1;q=0.4,application/json;q=0.5",
                Some(Form::Plain),
            ),
            (
                "application/vnd.kubernetes.protobuf,application/json",
                Some(Form::Plain),
            ),
            ("application/vnd.kubernetes.protobuf", None),
            ("application/json;as=Table;v=v1beta1;g=meta.k8s.io", None),
            (
                "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
                None,
            ),
            ("application/json;q=0", None),
            ("application/json;q=2", None),
            ("application/json;q=NaN", None),
            ("", None),
            (";;;,=,", None),
        ] {
            assert_eq!(choose(accept, &HAVE), form, "{accept}");
        }
    }

    #[test]
    fn who_says_nothing_takes_anything() {
        assert_eq!(negotiate(&HeaderMap::new(), &HAVE), Some(Form::Plain));
    }

    proptest! {
        #[test]
        fn any_text_is_read(accept in "[ -~]{0,200}") {
            let _ = choose(&accept, &HAVE);
        }
    }
}
