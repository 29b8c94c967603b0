//! Errors for people.

use std::{error::Error, fmt};

/// Prints an error with its causes, which say more than the outermost does.
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let (mut text, mut next) = (self.0.to_string(), self.0.source());
        while let Some(cause) = next {
            // Many errors print their cause themselves.
            let cause_text = cause.to_string();
            if !text.contains(&cause_text) {
                write!(f, ": {cause_text}")?;
                text = cause_text;
            }
            next = cause.source();
        }
        Ok(())
    }
}
