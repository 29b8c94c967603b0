//! A quick reader of JSON, for the one body that is read in the path of every pod.
//!
//! Nine tenths of a review are fields that nobody asks for. serde_json weighs each character of them; this reader passes
//! over them from quote to quote and bracket to bracket, in a third of the time. It never judges: of what it does not
//! understand it says so, and serde_json, which reads the same types, says what is wrong. It must never read a valid
//! document otherwise than serde_json does. What it passes over need not be valid.

use std::fmt::{self, Display};

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor},
    forward_to_deserialize_any,
};

/// Reads a document, or is not sure what it says: also where it is nested deeper than `max_depth`.
pub(super) fn read<'de, T: Deserialize<'de>>(text: &'de str, max_depth: usize) -> Option<T> {
    let mut reader = Reader {
        text,
        at: 0,
        room: max_depth,
    };
    let value = T::deserialize(&mut reader).ok()?;
    reader.peek().is_none().then_some(value)
}

/// Not understood.
#[derive(Debug)]
struct Unsure;

impl Display for Unsure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not understood")
    }
}

impl std::error::Error for Unsure {}

impl de::Error for Unsure {
    fn custom<T: Display>(_: T) -> Self {
        Self
    }
}

/// A place in a text.
struct Reader<'de> {
    text: &'de str,
    at: usize,
    /// How much deeper it may go from here.
    room: usize,
}

impl<'de> Reader<'de> {
    fn bytes(&self) -> &'de [u8] {
        self.text.as_bytes()
    }

    /// The next byte that is no space.
    fn peek(&mut self) -> Option<u8> {
        loop {
            let byte = *self.bytes().get(self.at)?;
            if !matches!(byte, b' ' | b'\n' | b'\t' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
    }

    /// Takes this byte, which must be the next.
    fn take(&mut self, byte: u8) -> Result<(), Unsure> {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        if found { Ok(()) } else { Err(Unsure) }
    }

    /// Takes these letters.
    fn take_word(&mut self, word: &str) -> Result<(), Unsure> {
        let found = self.bytes()[self.at..].starts_with(word.as_bytes());
        self.at += word.len();
        if found { Ok(()) } else { Err(Unsure) }
    }

    /// Takes a string with its quotes; what is between them is as it is written.
    fn take_string(&mut self) -> Result<&'de str, Unsure> {
        self.take(b'"')?;
        let begin = self.at;
        self.at = end_of_string(self.bytes(), begin).ok_or(Unsure)?;
        Ok(&self.text[begin..self.at - 1])
    }

    /// Takes a number and gives its text.
    fn take_number(&mut self) -> &'de str {
        let begin = self.at;
        let rest = self.bytes()[begin..].iter();
        let is_in_number =
            |byte: &&u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        self.at += rest.take_while(is_in_number).count();
        &self.text[begin..self.at]
    }

    /// Goes into the object or the array that begins here.
    fn enter(&mut self) -> Result<Members<'_, 'de>, Unsure> {
        self.at += 1;
        self.room = self.room.checked_sub(1).ok_or(Unsure)?;
        Ok(Members {
            reader: self,
            is_first: true,
        })
    }

    /// Comes out of it.
    fn leave(&mut self, end: u8) -> Result<(), Unsure> {
        self.room += 1;
        self.take(end)
    }

    fn visit_string<V: Visitor<'de>>(&mut self, visitor: V) -> Result<V::Value, Unsure> {
        let begin = self.at;
        let text = self.take_string()?;
        if is_plain(text.as_bytes()) {
            return visitor.visit_borrowed_str(text);
        }
        let quoted = &self.text[begin..self.at];
        visitor.visit_string(serde_json::from_str(quoted).map_err(|_| Unsure)?)
    }

    fn visit_number<V: Visitor<'de>>(&mut self, visitor: V) -> Result<V::Value, Unsure> {
        let number = serde_json::from_str::<serde_json::Number>(self.take_number());
        let number = number.map_err(|_| Unsure)?;
        if let Some(number) = number.as_u64() {
            visitor.visit_u64(number)
        } else if let Some(number) = number.as_i64() {
            visitor.visit_i64(number)
        } else {
            visitor.visit_f64(number.as_f64().ok_or(Unsure)?)
        }
    }

    /// Passes over a value.
    fn skip(&mut self) -> Result<(), Unsure> {
        match self.peek().ok_or(Unsure)? {
            b'"' => self.take_string().map(drop),
            b'{' | b'[' => self.skip_container(),
            b'-' | b'0'..=b'9' => {
                self.take_number();
                Ok(())
            }
            _ => self.take_literal().map(drop),
        }
    }

    /// Passes over an object or an array: to the bracket that closes it.
    fn skip_container(&mut self) -> Result<(), Unsure> {
        let bytes = self.bytes();
        let mut depth = 0;
        while let Some(byte) = bytes.get(self.at) {
            self.at += 1;
            match byte {
                b'"' => self.at = end_of_string(bytes, self.at).ok_or(Unsure)?,
                b'{' | b'[' if depth == self.room => return Err(Unsure),
                b'{' | b'[' => depth += 1,
                b'}' | b']' if depth == 1 => return Ok(()),
                b'}' | b']' => depth -= 1,
                _ => {}
            }
        }
        Err(Unsure)
    }

    /// Takes `true`, `false` or `null`, which is `None`.
    fn take_literal(&mut self) -> Result<Option<bool>, Unsure> {
        match self.peek() {
            Some(b't') => self.take_word("true").map(|()| Some(true)),
            Some(b'f') => self.take_word("false").map(|()| Some(false)),
            Some(b'n') => self.take_word("null").map(|()| None),
            _ => Err(Unsure),
        }
    }
}

/// Where a string ends, behind its closing quote; `at` is behind the opening one.
///
/// Looks at eight bytes at once. (Most strings are too short for a call to memchr to pay.)
fn end_of_string(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        at += quote_or_backslash(bytes.get(at..)?)?;
        if bytes[at] == b'"' {
            return Some(at + 1);
        }
        // A backslash, and what it escapes.
        at += 2;
    }
}

/// The first `"` or `\`.
#[inline]
fn quote_or_backslash(bytes: &[u8]) -> Option<usize> {
    let (words, rest) = bytes.as_chunks::<8>();
    for (index, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let found = equal(word, b'"') | equal(word, b'\\');
        if found != 0 {
            return Some(index * 8 + found.trailing_zeros() as usize / 8);
        }
    }
    let rest_at = words.len() * 8;
    let found = rest.iter().position(|byte| matches!(byte, b'"' | b'\\'));
    found.map(|index| rest_at + index)
}

/// Whether a string is what is written between its quotes: without escapes, and without control characters, which make it
/// invalid.
fn is_plain(text: &[u8]) -> bool {
    let (words, rest) = text.as_chunks::<8>();
    let odd = words.iter().fold(0, |odd, word| {
        let word = u64::from_le_bytes(*word);
        odd | equal(word, b'\\') | less(word, b' ')
    });
    odd == 0 && !rest.iter().any(|byte| *byte == b'\\' || *byte < b' ')
}

/// Each byte's lowest bit.
const LOW: u64 = u64::from_le_bytes([0x01; 8]);
/// Each byte's highest bit.
const HIGH: u64 = u64::from_le_bytes([0x80; 8]);

/// The highest bit of the first byte of a word that is this one is set, and none before it.
const fn equal(word: u64, byte: u8) -> u64 {
    less(word ^ u64::from_le_bytes([byte; 8]), 1)
}

/// The highest bit of the first byte of a word that is less than this one, at most 128, is set, and none before it.
const fn less(word: u64, byte: u8) -> u64 {
    word.wrapping_sub(LOW * byte as u64) & !word & HIGH
}

impl<'de> Deserializer<'de> for &mut Reader<'de> {
    type Error = Unsure;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsure> {
        match self.peek().ok_or(Unsure)? {
            b'"' => self.visit_string(visitor),
            b'{' => {
                let value = visitor.visit_map(self.enter()?)?;
                self.leave(b'}').map(|()| value)
            }
            b'[' => {
                let value = visitor.visit_seq(self.enter()?)?;
                self.leave(b']').map(|()| value)
            }
            b'-' | b'0'..=b'9' => self.visit_number(visitor),
            _ => match self.take_literal()? {
                Some(value) => visitor.visit_bool(value),
                None => visitor.visit_unit(),
            },
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsure> {
        if self.peek() == Some(b'n') {
            self.take_word("null")?;
            return visitor.visit_none();
        }
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unsure> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unsure> {
        self.skip()?;
        visitor.visit_unit()
    }

    // Enums, bytes and the like are in no review: their visitors are not sure either.
    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct enum identifier
    }
}

/// What is between two brackets.
struct Members<'a, 'de> {
    reader: &'a mut Reader<'de>,
    is_first: bool,
}

impl Members<'_, '_> {
    /// Whether there is one more. Takes the comma before it.
    fn has_next(&mut self, end: u8) -> Result<bool, Unsure> {
        if self.reader.peek() == Some(end) {
            return Ok(false);
        }
        if !std::mem::take(&mut self.is_first) {
            self.reader.take(b',')?;
        }
        Ok(true)
    }
}

impl<'de> MapAccess<'de> for Members<'_, 'de> {
    type Error = Unsure;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Unsure> {
        if !self.has_next(b'}')? {
            return Ok(None);
        }
        // A key is a string.
        if self.reader.peek() != Some(b'"') {
            return Err(Unsure);
        }
        seed.deserialize(&mut *self.reader).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Unsure> {
        self.reader.take(b':')?;
        seed.deserialize(&mut *self.reader)
    }
}

impl<'de> SeqAccess<'de> for Members<'_, 'de> {
    type Error = Unsure;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Unsure> {
        if !self.has_next(b']')? {
            return Ok(None);
        }
        seed.deserialize(&mut *self.reader).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*};
    use serde_json::{Map, Value, json};

    use super::*;

    const DEEP: usize = 100;

    /// All that JSON can say; strings are rich in what matters to a reader.
    fn value() -> impl Strategy<Value = Value> {
        let text = || {
            proptest::string::string_regex(r#"[a-z"\\{}\[\]:, \n\u{0}é€😀]{0,20}"#)
                .expect("a regex")
        };
        let number = prop_oneof![
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            number,
            text().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, move |inner| {
            let members = collection::vec((text(), inner.clone()), 0..6);
            prop_oneof![
                collection::vec(inner, 0..6).prop_map(Value::from),
                members.prop_map(|members| members.into_iter().collect::<Map<_, _>>().into()),
            ]
        })
    }

    fn written(value: &Value, pretty: bool) -> String {
        if pretty {
            format!("\r\n\t{value:#}\n")
        } else {
            value.to_string()
        }
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Wanted {
        wanted: Option<Vec<String>>,
    }

    proptest! {
        #[test]
        fn what_is_asked_for_is_read_as_serde_json_reads_it(value in value(), pretty: bool) {
            prop_assert_eq!(read::<Value>(&written(&value, pretty), DEEP), Some(value));
        }

        /// Any text: valid ones with one byte changed or lost are the nastiest.
        #[test]
        fn who_is_not_understood_is_not_guessed_at(value in value(), at: prop::sample::Index, byte in 0u8..128, cut: bool) {
            let mut bytes = written(&value, false).into_bytes();
            let at = at.index(bytes.len());
            if cut {
                bytes.remove(at);
            } else {
                bytes[at] = byte;
            }
            let Ok(text) = String::from_utf8(bytes) else { return Ok(()) };
            if let Some(read) = read::<Value>(&text, DEEP) {
                prop_assert_eq!(serde_json::from_str::<Value>(&text).ok(), Some(read));
            }
        }

        #[test]
        fn what_nobody_asks_for_is_passed_over(before in value(), after in value(), wanted: Option<Vec<String>>, pretty: bool) {
            let document = json!({"before": before, "wanted": wanted, "after": [after]});
            prop_assert_eq!(read::<Wanted>(&written(&document, pretty), DEEP), Some(Wanted { wanted }));
        }

        #[test]
        fn a_document_that_breaks_off_is_not_understood(value in value(), at: prop::sample::Index) {
            let document = json!({"before": value, "wanted": null}).to_string();
            let at = document.floor_char_boundary(at.index(document.len()));
            prop_assert_eq!(read::<Wanted>(&document[..at], DEEP), None);
        }
    }

    #[test]
    fn depth_is_bounded_in_what_is_passed_over_and_in_what_is_read() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let skipped = |depth| {
            read::<Wanted>(
                &format!(r#"{{"a":{},"wanted":null}}"#, nested(depth - 1)),
                DEEP,
            )
        };
        assert!(skipped(DEEP).is_some());
        assert!(skipped(DEEP + 1).is_none());
        assert!(read::<Value>(&nested(DEEP), DEEP).is_some());
        assert!(read::<Value>(&nested(DEEP + 1), DEEP).is_none());
    }

    #[test]
    fn what_is_no_document_is_not_understood() {
        for text in [
            "",
            " ",
            "{",
            "nul",
            "[1,]",
            "{,}",
            r#"{"a" 1}"#,
            "{1:1}",
            "[1 2]",
            "1 2",
            "01",
            "1.",
            "\"\n\"",
            r#""\x""#,
            r#"""#,
        ] {
            assert_eq!(read::<Value>(text, DEEP), None, "{text:?}");
        }
    }
}
