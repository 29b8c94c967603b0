//! `docs/architecture.md` shows which module needs which, as the code has it.

#[path = "common/page.rs"]
mod page;
#[path = "common/source.rs"]
mod source;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use source::{paths, sources, tokens};

const PAGE: &str = "docs/architecture.md";
/// What the diagram stands between.
const MARKS: (&str, &str) = ("<!-- modules -->\n", "<!-- /modules -->");

/// The top-level modules, each with those that it names.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// The graph of sources, which come by their paths below `src`. What only puts modules together, `lib.rs` and `main.rs`,
/// is left out, and so are unit tests, which stand at the end of their file.
fn graph<'a>(sources: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> Graph {
    let module = |path: &str| {
        let first = path.split('/').next().unwrap_or_default();
        first.trim_end_matches(".rs").to_owned()
    };
    let named: BTreeSet<String> = sources.clone().map(|(path, _)| module(path)).collect();
    let mut graph = Graph::new();
    for (path, source) in sources {
        let module = module(path);
        if ["lib", "main"].contains(&module.as_str()) {
            continue;
        }
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        let needed: Vec<String> = paths(&tokens(code))
            .into_iter()
            .filter(|(_, path)| path.first() == Some(&"crate"))
            .filter_map(|(_, path)| path.get(1).map(|&other| other.to_owned()))
            .filter(|other| *other != module && named.contains(other))
            .collect();
        graph.entry(module).or_default().extend(needed);
    }
    graph
}

/// All that a module needs, directly or not.
fn reachable(graph: &Graph, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from.to_owned()];
    while let Some(module) = open.pop() {
        for next in graph.get(&module).into_iter().flatten() {
            if reached.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    reached
}

/// The arrows that do not follow from others. Two modules that need each other count as one place on the way.
fn arrows(graph: &Graph) -> Vec<(String, String)> {
    let reach: BTreeMap<&str, BTreeSet<String>> = graph
        .keys()
        .map(|module| (module.as_str(), reachable(graph, module)))
        .collect();
    let leads = |from: &str, to: &str| reach.get(from).is_some_and(|reach| reach.contains(to));
    let is_same = |a: &str, b: &str| a == b || (leads(a, b) && leads(b, a));
    let follows = |from: &str, to: &str| {
        let mut others = graph[from].iter();
        !is_same(from, to)
            && others.any(|by| leads(by, to) && !is_same(by, from) && !is_same(by, to))
    };
    let all = graph
        .iter()
        .flat_map(|(from, needed)| needed.iter().map(move |to| (from.clone(), to.clone())));
    all.filter(|(from, to)| !follows(from, to)).collect()
}

/// The diagram; two arrows between the same modules are one with two heads.
fn mermaid(graph: &Graph) -> String {
    let arrows = arrows(graph);
    let mut lines = vec!["```mermaid".to_owned(), "flowchart LR".to_owned()];
    for (from, to) in &arrows {
        let is_mutual = arrows.contains(&(to.clone(), from.clone()));
        match (is_mutual, from < to) {
            (false, _) => lines.push(format!("    {from} --> {to}")),
            (true, true) => lines.push(format!("    {from} <--> {to}")),
            (true, false) => {}
        }
    }
    lines.push("```\n".to_owned());
    lines.join("\n")
}

#[test]
fn the_page_shows_the_modules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let sources: Vec<(String, String)> = sources(&root)
        .into_iter()
        .map(|(path, text)| {
            let path = Path::new(&path).strip_prefix(&root).expect("it is below");
            (path.display().to_string(), text)
        })
        .collect();
    let graph = graph(
        sources
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str())),
    );
    let page = page::read(PAGE);
    let (before, rest) = page.split_once(MARKS.0).expect(MARKS.0);
    let (_, after) = rest.split_once(MARKS.1).expect(MARKS.1);
    let diagram = mermaid(&graph);
    page::keep(
        PAGE,
        &format!("{before}{}{diagram}{}{after}", MARKS.0, MARKS.1),
    );
    let unnamed = graph.keys().filter(|module| {
        let names = [format!("`{module}`"), format!("`{module}/`")];
        !names.iter().any(|name| page.contains(name.as_str()))
    });
    assert_eq!(
        unnamed.collect::<Vec<_>>(),
        [""; 0],
        "{PAGE} says nothing of these"
    );
}

#[test]
fn arrows_that_follow_are_left_out() {
    let graph = graph(
        [
            ("lib.rs", "use crate::a::A;"),
            ("a/mod.rs", "use crate::{b::B, c::{C, D}, nowhere::E};"),
            (
                "a/more.rs",
                "// crate::e\nuse crate::a::A; pub(crate) fn f() {}",
            ),
            (
                "b.rs",
                "use crate::c::C;\n#[cfg(test)]\nmod tests { use crate::e::E; }",
            ),
            ("c.rs", "fn f() { crate::d::f() }"),
            ("d.rs", "use crate::c::C;"),
            ("e.rs", ""),
        ]
        .into_iter(),
    );
    let arrows = arrows(&graph);
    let arrows: Vec<String> = arrows
        .iter()
        .map(|(from, to)| format!("{from}{to}"))
        .collect();
    assert_eq!(arrows, ["ab", "bc", "cd", "dc"]);
    assert_eq!(
        mermaid(&graph),
        "```mermaid\nflowchart LR\n    a --> b\n    b --> c\n    c <--> d\n```\n"
    );
}
