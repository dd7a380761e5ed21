//! docs/threat-model.md names tests that exist.

use crate::{read, workspace};

/// The text between two backquotes, if it names a test.
fn named_tests(page: &str) -> impl Iterator<Item = (&str, &str)> {
    let quoted = page.split('`').skip(1).step_by(2);
    quoted
        .filter(|text| text.starts_with("crates/") && !text.contains(' '))
        .filter_map(|text| text.split_once("::"))
}

#[test]
fn each_test_of_the_threat_model_exists() {
    let page = read("docs/threat-model.md");
    let tests: Vec<_> = named_tests(&page).collect();
    assert!(tests.len() > 100, "{tests:?}");
    for (file, test) in tests {
        assert!(workspace().join(file).is_file(), "there is no file {file}");
        let code = read(file);
        let mut functions = code.split("fn ").skip(1).map(|rest| rest.split(['(', '<']).next());
        assert!(functions.any(|name| name == Some(test)), "{file} has no test {test}");
    }
}

#[test]
fn names_of_tests_are_found_in_tables() {
    let page = "| x | `crates/a/src/b.rs::c`, `crates/a/src/d.rs` | `e::f` | `crates/g.rs::h` |";
    let tests: Vec<_> = named_tests(page).collect();
    assert_eq!(tests, [("crates/a/src/b.rs", "c"), ("crates/g.rs", "h")]);
}
