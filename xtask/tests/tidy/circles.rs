//! Finds files of a crate that use each other in a circle. A parent module and its child may do so.

use std::collections::{BTreeMap, BTreeSet};

/// A module, as its path from the root of the crate; empty for the root.
type Module = Vec<String>;

/// The circles among files, each as a list of its modules in order. A file is its path below `src/` and its code.
pub(crate) fn circles(files: &[(&str, String)]) -> BTreeSet<String> {
    let files: BTreeMap<Module, &String> = files.iter().map(|(path, code)| (module(path), code)).collect();
    let uses: BTreeMap<&Module, BTreeSet<&Module>> =
        files.iter().map(|(module, code)| (module, used(module, code, &files))).collect();
    let circles = files.keys().filter_map(|module| {
        let forth = reached(module, &uses);
        let circle: Vec<_> =
            forth.into_iter().filter(|other| reached(other, &uses).contains(module)).collect();
        let names: Vec<_> = circle.iter().map(|module| module.join("::")).collect();
        (!names.is_empty()).then(|| names.join(" "))
    });
    circles.collect()
}

fn module(path: &str) -> Module {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    let is_root = ["lib", "main"].contains(&path);
    if is_root { Vec::new() } else { path.split('/').map(str::to_owned).collect() }
}

/// All modules that a module reaches. It contains the module itself only if that is in a circle.
fn reached<'a>(
    module: &'a Module,
    uses: &BTreeMap<&'a Module, BTreeSet<&'a Module>>,
) -> BTreeSet<&'a Module> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![module]);
    while let Some(module) = next.pop() {
        next.extend(uses[module].iter().filter(|other| reached.insert(**other)));
    }
    reached
}

/// The modules that a file names, except its ancestors and descendants.
fn used<'a>(module: &Module, code: &str, files: &'a BTreeMap<Module, &String>) -> BTreeSet<&'a Module> {
    let absolute = paths(code).into_iter().filter_map(|path| absolute(module, path, files));
    let owners = absolute.filter_map(|path| {
        (0..=path.len()).rev().find_map(|length| files.get_key_value(&path[..length]).map(|(found, _)| found))
    });
    owners.filter(|other| !other.starts_with(module) && !module.starts_with(other)).collect()
}

/// Converts a path to one from the root of the crate; `None` if it leads into another crate.
fn absolute(module: &Module, path: Module, files: &BTreeMap<Module, &String>) -> Option<Module> {
    let supers = path.iter().take_while(|part| *part == "super").count();
    let (base, rest) = match path.first()?.as_str() {
        "crate" => (&module[..0], &path[1..]),
        "self" => (&module[..], &path[1..]),
        "super" => (&module[..module.len().saturating_sub(supers)], &path[supers..]),
        _ if files.contains_key(&[module.as_slice(), &path[..1]].concat()) => (&module[..], &path[..]),
        _ => return None,
    };
    Some([base, rest].concat())
}

/// Every path with `::` in the code; paths in braces are listed separately.
fn paths(code: &str) -> Vec<Module> {
    let mut found = Vec::new();
    // The part before each open brace of a `use`.
    let mut prefixes: Vec<Module> = Vec::new();
    let mut path: Module = Vec::new();
    let mut rest = code;
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        if length > 0 {
            path.push(rest[..length].to_owned());
            rest = &rest[length..];
            if let Some(after) = rest.strip_prefix("::") {
                rest = after;
                if let Some(inside) = rest.strip_prefix('{') {
                    prefixes.push(
                        [prefixes.last().cloned().unwrap_or_default(), std::mem::take(&mut path)].concat(),
                    );
                    rest = inside;
                }
                continue;
            }
            let whole = [prefixes.last().cloned().unwrap_or_default(), std::mem::take(&mut path)].concat();
            found.extend((whole.len() > 1).then_some(whole));
            continue;
        }
        path.clear();
        if first == '}' {
            prefixes.pop();
        }
        rest = &rest[first.len_utf8()..];
    }
    found
}

#[test]
fn circles_are_detected() {
    // Each line is a file and its code.
    for (given, expected) in [
        ("lib.rs mod a;\na.rs use crate::b::B;\nb.rs", None),
        ("a.rs use crate::b::B;\nb.rs fn f() { crate::a::g() }", Some("a b")),
        ("a.rs use crate::{c::C, b::{B, D}};\nb.rs\nc.rs use crate::a::X;", Some("a c")),
        ("a.rs use crate::{b::{B, D}, E};\nb.rs use super::c::E;\nc.rs use crate::a::X;", Some("a b c")),
        ("a/mod.rs mod c; use c::C;\na/c.rs use super::A;", None),
        ("a/mod.rs use crate::b::B;\nb.rs use crate::a::c::C;\na/c.rs ", None),
        ("a.rs use std::b::B;\nb.rs use crate::a::A;", None),
        ("a/b.rs use super::c::C;\na/c.rs let x = super::b::y();\na.rs", Some("a::b a::c")),
    ] {
        let files: Vec<_> = given
            .lines()
            .map(|line| line.split_once(' ').unwrap_or((line, "")))
            .map(|(path, code)| (path, code.to_owned()))
            .collect();
        assert_eq!(circles(&files), expected.map(str::to_owned).into_iter().collect(), "{given}");
    }
}
