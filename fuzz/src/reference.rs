//! What `headstart::domain` is compared with: slow, and obviously right.

use std::{collections::BTreeMap, sync::LazyLock};

use headstart::domain::quantity::QuantityError;
use num_bigint::{BigInt, BigUint};
use num_rational::BigRational;
use num_traits::{Pow, Zero};
use regex::Regex;

/// The grammar of `resource.Quantity`: sign, number, fraction, suffix.
static GRAMMAR: LazyLock<Regex> = LazyLock::new(|| {
    let suffix = "n|u|m||k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+";
    let pattern = format!(r"^([+-]?)(?:([0-9]+)\.?([0-9]*)|\.([0-9]+))({suffix})$");
    Regex::new(&pattern).expect("a valid pattern")
});

/// An amount as it was written: `digits × 2^binary × 10^decimal`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Amount {
    negative: bool,
    digits: BigUint,
    binary: u32,
    decimal: i64,
}

impl Amount {
    /// Reads an amount; exponents are 32 bits wide.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let parts = GRAMMAR.captures(text)?;
        let part = |index| parts.get(index).map_or("", |part| part.as_str());
        let fraction = format!("{}{}", part(3), part(4));
        let fraction = fraction.trim_end_matches('0');
        let (binary, decimal) = suffix(part(5))?;
        let digits = format!("0{}{fraction}", part(2));
        Some(Self {
            negative: part(1) == "-",
            digits: digits.parse().expect("digits are a number"),
            binary,
            decimal: decimal - i64::try_from(fraction.len()).expect("a short text"),
        })
    }

    /// Whether the digits alone, times the power of two, need more than 128 bits. Such an amount may be refused
    /// whatever its value is.
    #[must_use]
    pub fn is_wide(&self) -> bool {
        (self.digits.clone() << self.binary).bits() > 128
    }

    /// Thousandths, rounded up.
    ///
    /// # Errors
    /// When it is negative, or too much for 128 bits.
    pub fn milli(&self) -> Result<u128, QuantityError> {
        if self.digits.is_zero() {
            return Ok(0);
        }
        if self.negative {
            return Err(QuantityError::Negative);
        }
        let length = i64::try_from(self.digits.bits()).expect("a short text");
        // Far out of range on either side: nothing to compute.
        if self.decimal > 100 {
            return Err(QuantityError::OutOfRange);
        }
        if self.decimal < -(length + 100) {
            return Ok(1);
        }
        let decimal = i32::try_from(self.decimal).expect("bounded above");
        let ten = BigRational::from_integer(BigInt::from(10));
        let value = BigRational::from_integer(BigInt::from(self.digits.clone() << self.binary))
            * Pow::pow(ten, decimal + 3);
        u128::try_from(value.ceil().to_integer()).map_err(|_| QuantityError::OutOfRange)
    }
}

/// A suffix as a power of two and a power of ten.
fn suffix(text: &str) -> Option<(u32, i64)> {
    let position = |list: &[&str]| list.iter().position(|one| *one == text);
    let small = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
    if let Some(index) = position(&small) {
        return Some((0, 3 * (i64::try_from(index).ok()? - 3)));
    }
    let binary = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if let Some(index) = position(&binary) {
        return Some((10 * u32::try_from(index).ok()?, 0));
    }
    let exponent: BigInt = text.get(1..)?.parse().ok()?;
    i32::try_from(exponent)
        .ok()
        .map(|exponent| (0, exponent.into()))
}

/// One requirement of a label selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement<'a> {
    /// The label's key.
    pub key: &'a str,
    /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
    pub operator: &'a str,
    /// The values that it names.
    pub values: Vec<&'a str>,
}

impl Requirement<'_> {
    /// Whether the API server would take it, or `None` where the operator is unknown.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        match self.operator {
            "In" | "NotIn" => !self.values.is_empty(),
            "Exists" | "DoesNotExist" => self.values.is_empty(),
            _ => false,
        }
    }

    /// Whether labels meet it.
    #[must_use]
    pub fn is_met(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(self.key);
        let named = value.is_some_and(|value| self.values.contains(&value.as_str()));
        match self.operator {
            "In" => named,
            "NotIn" => !named,
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            _ => false,
        }
    }
}
