//! Exact CPU quantities: the grammar of Kubernetes' `resource.Quantity` in, its canonical form out.
//!
//! No floating point and no rounding but the API server's own: amounts are rounded up to whole milli-CPU
//! (`SetDefaults_ResourceList` in Kubernetes does that to every pod it stores).

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

/// A CPU amount in milli-CPU, thousandths of a core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MilliCpu(u64);

/// Why a text is no CPU quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not in the grammar.
    #[error("not a quantity (write cores such as 2 or milli-cores such as 1500m)")]
    Malformed,
    /// Below zero.
    #[error("negative")]
    Negative,
    /// Above [`MilliCpu::MAX`].
    #[error("more than 1M cores")]
    OutOfRange,
}

impl MilliCpu {
    /// A million cores: more than any machine has, and little enough that sums never overflow.
    pub const MAX: Self = Self(1_000_000_000);

    /// Percentages are rounded up to this many milli-CPU, as upstream does (two decimals of a core).
    pub const PERCENT_STEP: u64 = 10;

    /// That many milli-CPU.
    #[must_use]
    pub const fn new(milli: u64) -> Self {
        Self(milli)
    }

    /// How many milli-CPU.
    #[must_use]
    pub const fn milli(self) -> u64 {
        self.0
    }

    /// Whether it is nothing.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// `self × (100 + percent) / 100`, exactly, then rounded up to [`Self::PERCENT_STEP`], at most [`Self::MAX`].
    ///
    /// ```
    /// # use headstart::domain::quantity::MilliCpu;
    /// assert_eq!(MilliCpu::new(250).increased_by(50).to_string(), "380m");
    /// ```
    #[must_use]
    pub fn increased_by(self, percent: u64) -> Self {
        let product = u128::from(self.0) * (100 + u128::from(percent));
        let steps = product.div_ceil(100 * u128::from(Self::PERCENT_STEP));
        let milli = steps.saturating_mul(u128::from(Self::PERCENT_STEP));
        u64::try_from(milli).map_or(Self::MAX, |milli| Self(milli).min(Self::MAX))
    }
}

impl FromStr for MilliCpu {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let milli = parse_milli(text)?;
        u64::try_from(milli)
            .ok()
            .map(Self)
            .filter(|cpu| *cpu <= Self::MAX)
            .ok_or(QuantityError::OutOfRange)
    }
}

/// The canonical form: the largest suffix that leaves a whole number.
impl fmt::Display for MilliCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("0"),
            milli if milli % 1_000_000_000 == 0 => write!(f, "{}M", milli / 1_000_000_000),
            milli if milli % 1_000_000 == 0 => write!(f, "{}k", milli / 1_000_000),
            milli if milli % 1_000 == 0 => write!(f, "{}", milli / 1_000),
            milli => write!(f, "{milli}m"),
        }
    }
}

/// As Kubernetes writes quantities: its canonical form, as text.
impl Serialize for MilliCpu {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

/// Any quantity in thousandths of its unit, rounded up: enough to compare memory amounts too.
///
/// # Errors
/// When the text is not in the grammar, is negative, or exceeds 128 bits.
pub fn parse_milli(text: &str) -> Result<u128, QuantityError> {
    use QuantityError::{Malformed, Negative, OutOfRange};

    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let end = unsigned
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() == 0 || fraction.contains('.') {
        return Err(Malformed);
    }
    let (binary, decimal) = exponents(suffix).ok_or(Malformed)?;
    let fraction = fraction.trim_end_matches('0');
    let digits = whole
        .bytes()
        .chain(fraction.bytes())
        .map(|digit| digit - b'0');
    if digits.clone().all(|digit| digit == 0) {
        return Ok(0);
    }
    if negative {
        return Err(Negative);
    }
    // value in thousandths = digits × 2^binary × 10^(decimal - fraction digits + 3)
    let digits = number_of(digits).ok_or(OutOfRange)?;
    let scaled = digits
        .checked_shl(binary)
        .filter(|scaled| scaled >> binary == digits)
        .ok_or(OutOfRange)?;
    let fraction = i64::try_from(fraction.len()).map_err(|_| OutOfRange)?;
    let exponent = decimal - fraction + 3;
    match u32::try_from(exponent) {
        Ok(up) => 10u128
            .checked_pow(up)
            .and_then(|factor| scaled.checked_mul(factor))
            .ok_or(OutOfRange),
        // Smaller than any representable amount: Kubernetes rounds up, never to zero.
        Err(_) => {
            Ok(power_of_ten(exponent.unsigned_abs()).map_or(1, |divisor| scaled.div_ceil(divisor)))
        }
    }
}

fn number_of(digits: impl IntoIterator<Item = u8>) -> Option<u128> {
    digits.into_iter().try_fold(0u128, |number, digit| {
        number.checked_mul(10)?.checked_add(digit.into())
    })
}

fn power_of_ten(exponent: u64) -> Option<u128> {
    10u128.checked_pow(u32::try_from(exponent).ok()?)
}

/// What a suffix stands for: a power of two and a power of ten.
fn exponents(suffix: &str) -> Option<(u32, i64)> {
    Some(match suffix {
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "" => (0, 0),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        _ => (
            0,
            suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?.into(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn milli(text: &str) -> Result<u64, QuantityError> {
        text.parse::<MilliCpu>().map(MilliCpu::milli)
    }

    #[test]
    fn reads_the_whole_grammar() {
        for (text, expected) in [
            ("0", 0),
            ("0m", 0),
            ("-0", 0),
            ("100m", 100),
            ("1.", 1000),
            (".5", 500),
            ("+.7", 700),
            ("7e-1", 700),
            ("1.5e-3", 2),
            ("1k", 1_000_000),
            ("1Ki", 1_024_000),
            ("1E3", 1_000_000),
            ("1n", 1),
            ("1001u", 2),
            ("100000000n", 100),
            ("0.0001", 1),
            ("1e-400", 1),
            ("1M", 1_000_000_000),
        ] {
            assert_eq!(milli(text), Ok(expected), "{text}");
        }
        let malformed = [
            "", "+", "m", ".", "+-1", "--1", "1.1.M", "1K", "1mi", "0.1am", "1e", "1e-", "1_0",
            "0x1", " 1", "1,5", "inf", "٣",
        ];
        for text in malformed {
            assert_eq!(milli(text), Err(QuantityError::Malformed), "{text}");
        }
        assert_eq!(milli("-1"), Err(QuantityError::Negative));
        for text in [
            "1E",
            "1000001",
            "1e400",
            "1Ei",
            "99999999999999999999999999999999999999999",
        ] {
            assert_eq!(milli(text), Err(QuantityError::OutOfRange), "{text}");
        }
    }

    #[test]
    fn prints_the_canonical_form() {
        for (milli, text) in [
            (0, "0"),
            (1, "1m"),
            (1000, "1"),
            (1500, "1500m"),
            (1_000_000, "1k"),
            (2_500_000, "2500"),
        ] {
            assert_eq!(MilliCpu::new(milli).to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn printing_and_reading_is_the_identity(m in 0..=MilliCpu::MAX.milli()) {
            prop_assert_eq!(milli(&MilliCpu::new(m).to_string()), Ok(m));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "\\PC*") {
            let _ = parse_milli(&text);
        }

        #[test]
        fn any_number_is_read_or_refused(text in "[+-]?[0-9]{0,40}\\.?[0-9]{0,40}(n|u|m|k|E|Ki|Ei|e[+-]?[0-9]{1,12})?") {
            let _ = parse_milli(&text);
        }

        #[test]
        fn an_increase_never_lowers_and_grows_with_the_percentage(m in 0..=MilliCpu::MAX.milli(), a: u64, b: u64) {
            let (small, large) = (MilliCpu::new(m).increased_by(a.min(b)), MilliCpu::new(m).increased_by(a.max(b)));
            prop_assert!(MilliCpu::new(m) <= small && small <= large && large <= MilliCpu::MAX);
        }
    }
}
