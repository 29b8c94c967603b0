//! The pages for people, those at the top and in `docs`: their links lead somewhere, the tests that they name exist, and
//! `docs/examples.md` shows what `headstart explain` prints.

#[path = "common/page.rs"]
mod page;

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs, iter,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use regex::Regex;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const NOW: &str = "--now=2026-12-01T10:00:00Z";

/// The pages, each with its text.
fn pages() -> Result<Vec<(PathBuf, String)>> {
    let root = Path::new(ROOT);
    let mut paths = Vec::new();
    for folder in ["", "docs", "docs/decisions"] {
        for entry in fs::read_dir(root.join(folder))? {
            paths.push(entry?.path());
        }
    }
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    paths
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            Ok((path, text))
        })
        .collect()
}

/// A page without its blocks of code.
fn prose(page: &str) -> String {
    let mut is_code = false;
    let mut prose = String::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            prose.push_str(line);
            prose.push('\n');
        }
    }
    prose
}

/// What a link may have after its `#`: a name for each heading, as GitHub makes it.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in prose(page).lines() {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let slug: String = heading
            .trim()
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let repeated = (1..).map(|count| format!("{slug}-{count}"));
        let free = iter::once(slug.clone())
            .chain(repeated)
            .find(|slug| !anchors.contains(slug));
        anchors.extend(free);
    }
    anchors
}

/// Links of the page at `path` to files and headings of the repository that do not exist.
fn dead_links(path: &Path, page: &str) -> Result<Vec<String>> {
    let link = Regex::new(r"\]\(([^)\s]+)\)")?;
    let mut dead = Vec::new();
    for link in link.captures_iter(&prose(page)) {
        let link = &link[1];
        if link.contains("://") {
            continue;
        }
        let (file, anchor) = link
            .split_once('#')
            .map_or((link, None), |(file, anchor)| (file, Some(anchor)));
        let target = match file {
            "" => path.to_owned(),
            file => path.with_file_name(file),
        };
        let leads = match anchor {
            None => target.exists(),
            Some(anchor) if file.is_empty() => anchors(page).contains(anchor),
            Some(anchor) => {
                fs::read_to_string(&target).is_ok_and(|page| anchors(&page).contains(anchor))
            }
        };
        if !leads {
            dead.push(link.to_owned());
        }
    }
    Ok(dead)
}

/// Tests that a page names, as `file.rs::function` or `file.rs::begin_…`, and that do not exist.
fn unknown_tests(page: &str) -> Result<Vec<String>> {
    let name = Regex::new(r"`([\w/]+\.rs)::(\w+)(…?)`")?;
    let mut unknown = Vec::new();
    for name in name.captures_iter(page) {
        let end = if name[3].is_empty() { "(" } else { "" };
        let function = format!("fn {}{end}", &name[2]);
        let file = Path::new(ROOT).join("tests").join(&name[1]);
        if !fs::read_to_string(file).is_ok_and(|text| text.contains(&function)) {
            unknown.push(name[0].to_owned());
        }
    }
    Ok(unknown)
}

#[test]
fn links_lead_somewhere() -> Result<()> {
    let mut dead = String::new();
    for (path, page) in pages()? {
        for link in dead_links(&path, &page)? {
            writeln!(dead, "{}: {link}", path.display())?;
        }
    }
    ensure!(dead.is_empty(), "these lead nowhere:\n{dead}");
    Ok(())
}

#[test]
fn tests_that_are_named_exist() -> Result<()> {
    let mut unknown = String::new();
    for (path, page) in pages()? {
        for test in unknown_tests(&page)? {
            writeln!(unknown, "{}: {test}", path.display())?;
        }
    }
    ensure!(unknown.is_empty(), "these do not exist:\n{unknown}");
    Ok(())
}

#[test]
fn what_is_wrong_is_found() -> Result<()> {
    let page = "\
# A `page`: its end
## Twice
## Twice
[file](docs/see.md) [folder](docs) [heading](#a-page-its-end) [second](#twice-1) [there](docs/see.md#fields)
[elsewhere](https://example.com/nowhere.md#nowhere)
`pages.rs::what_is_wrong_is_found` `pages.rs::what_is_…`
```
[code](nowhere.md)
```
[1](nowhere.md) [2](#nowhere) [3](#twice-2) [4](docs/see.md#nowhere) [5](nowhere.md#fields)
`pages.rs::nothing_is_wrong` `nowhere.rs::what_is_…`
";
    let dead = dead_links(&Path::new(ROOT).join("README.md"), page)?;
    let expected = [
        "nowhere.md",
        "#nowhere",
        "#twice-2",
        "docs/see.md#nowhere",
        "nowhere.md#fields",
    ];
    ensure!(dead == expected, "{dead:?}");
    let unknown = unknown_tests(page)?;
    let expected = ["`pages.rs::nothing_is_wrong`", "`nowhere.rs::what_is_…`"];
    ensure!(unknown == expected, "{unknown:?}");
    Ok(())
}

/// What `headstart explain` says of an example. Record and patch are left out: `docs/explain.md` shows them.
fn explained(file: &str) -> Result<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_headstart"))
        .args(["explain", "--offline", NOW, "--pod", file])
        .current_dir(ROOT)
        .env_clear()
        .output()
        .context("running headstart")?;
    ensure!(output.status.success(), "{file}: {output:?}");
    let printed = String::from_utf8(output.stdout)?;
    let is_left_out = |line: &&str| {
        let starts = ["  record: ", "  patch:", "    {"];
        starts.iter().any(|start| line.starts_with(start))
    };
    let lines = printed.lines().filter(|line| !is_left_out(line));
    Ok(lines.fold(String::new(), |text, line| text + line + "\n"))
}

/// The page with each block anew that names an example: `yaml NAME` is its file, `text NAME` what is said of it.
fn with_examples(page: &str) -> Result<String> {
    let mut new = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        writeln!(new, "{line}")?;
        let named = |kind| line.strip_prefix("```")?.strip_prefix(kind);
        let block = match (named("yaml "), named("text ")) {
            (Some(name), _) => {
                let file = Path::new(ROOT).join(format!("docs/examples/{name}.yaml"));
                fs::read_to_string(&file).with_context(|| file.display().to_string())?
            }
            (_, Some(name)) => explained(&format!("docs/examples/{name}.yaml"))?,
            (None, None) => continue,
        };
        let end = lines.by_ref().find(|line| *line == "```");
        writeln!(new, "{block}{}", end.context("a block has no end")?)?;
    }
    Ok(new)
}

#[test]
fn the_examples_show_what_is_printed() -> Result<()> {
    let page = with_examples(&page::read("docs/examples.md"))?;
    page::keep("docs/examples.md", &page);
    for file in fs::read_dir(Path::new(ROOT).join("docs/examples"))? {
        let path = file?.path();
        let name = path.file_stem().context("a file has a name")?;
        let block = format!("```yaml {}\n", name.display());
        ensure!(page.contains(&block), "{} is not shown", path.display());
    }
    Ok(())
}
