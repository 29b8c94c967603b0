//! Any text, as a quantity: read or refused as an exact fraction says.
#![no_main]

use headstart::domain::quantity::{MilliCpu, QuantityError, parse_milli};
use headstart_fuzz::reference::Amount;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let amount = Amount::read(text);
    let expected = amount
        .as_ref()
        .map_or(Err(QuantityError::Malformed), Amount::milli);
    let found = parse_milli(text);
    let wide = amount.as_ref().is_some_and(Amount::is_wide);
    if !(wide && found == Err(QuantityError::OutOfRange)) {
        assert_eq!(found, expected, "{text:?}");
    }
    cpu(text, found);
});

/// A CPU amount is any amount up to a million cores, and prints as it reads.
fn cpu(text: &str, milli: Result<u128, QuantityError>) {
    let most = u128::from(MilliCpu::MAX.milli());
    let expected = milli.and_then(|milli| match u64::try_from(milli) {
        Ok(cpu) if milli <= most => Ok(MilliCpu::new(cpu)),
        _ => Err(QuantityError::OutOfRange),
    });
    let found = text.parse::<MilliCpu>();
    assert_eq!(found, expected, "{text:?}");
    if let Ok(cpu) = found {
        assert_eq!(cpu.to_string().parse(), Ok(cpu), "{text:?}");
    }
}
