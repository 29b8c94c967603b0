//! Reads Rust as far as it has to be known which paths a source names: comments and literals are passed over, braces put
//! together.

use std::{fs, path::Path};

/// Words, `::`, braces, commas, stars and semicolons with their lines; the rest as blanks.
pub(crate) fn tokens(source: &str) -> Vec<(usize, &str)> {
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while let Some(next) = source[at..].chars().next() {
        let rest = &source[at..];
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = raw_string(rest) {
            length
        } else if next == '"' {
            string(rest)
        } else if next == '\'' {
            character(rest)
        } else if next.is_alphanumeric() || next == '_' {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
            let word = &rest[..end.unwrap_or(rest.len())];
            tokens.push((line, word));
            word.len()
        } else if rest.starts_with("::") {
            tokens.push((line, "::"));
            2
        } else {
            let length = next.len_utf8();
            if !next.is_whitespace() {
                tokens.push((line, &rest[..length]));
            }
            length
        };
        line += rest[..length].matches('\n').count();
        at += length;
    }
    tokens
}

/// The length of a string literal, quotes included.
fn string(rest: &str) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// The length of a raw string literal, if one begins here.
fn raw_string(rest: &str) -> Option<usize> {
    let after = rest.strip_prefix('r')?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let text = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = text.find(&end).map_or(text.len(), |at| at + end.len());
    Some(1 + hashes + 1 + length)
}

/// The length of a character literal; a lifetime's quote is one character.
fn character(rest: &str) -> usize {
    let mut characters = rest.char_indices().skip(1);
    match characters.next() {
        Some((_, '\\')) => rest[2..].find('\'').map_or(1, |at| at + 3),
        _ => match characters.next() {
            Some((at, '\'')) => at + 1,
            _ => 1,
        },
    }
}

/// All paths, with those in braces put together: `a::{b, c::*}` is `a::b` and `a::c::*`.
pub(crate) fn paths<'a>(tokens: &[(usize, &'a str)]) -> Vec<(usize, Vec<&'a str>)> {
    let mut found = Vec::new();
    // What stands before each open brace; none for a block.
    let mut prefixes: Vec<Vec<&str>> = Vec::new();
    let mut path: Vec<&str> = Vec::new();
    let mut joined = false;
    for (line, token) in tokens {
        let is_word = token.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        match *token {
            "::" => joined = true,
            "{" => {
                let prefix = if joined {
                    std::mem::take(&mut path)
                } else {
                    Vec::new()
                };
                path.clear();
                prefixes.push(prefix);
                joined = false;
            }
            token if is_word || (token == "*" && joined) => {
                if !joined {
                    path.clear();
                    path.extend(prefixes.last().into_iter().flatten());
                }
                path.push(token);
                joined = false;
                found.push((*line, path.clone()));
            }
            "*" if prefixes.last().is_some_and(|prefix| !prefix.is_empty()) => {
                path.clear();
                path.extend(prefixes.last().into_iter().flatten());
                path.push("*");
                found.push((*line, path.clone()));
            }
            token => {
                if token == "}" {
                    prefixes.pop();
                }
                path.clear();
                joined = false;
            }
        }
    }
    found
}

/// Every Rust file below a directory.
pub(crate) fn sources(directory: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("the directory can be read") {
        let path = entry.expect("its entries can be read").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a source file can be read");
            found.push((path.display().to_string(), text));
        }
    }
    found
}
