//! docs/hns-problems.md names tests that exist.

use std::collections::BTreeSet;
use std::process::Command;

use crate::{read, workspace};

#[test]
fn each_reported_problem_of_hns_has_tests_or_a_reason() {
    let page = read("docs/hns-problems.md");
    let listed = Command::new("git").args(["ls-files", "*.rs"]).current_dir(workspace()).output().unwrap();
    let sources: String = String::from_utf8(listed.stdout).unwrap().lines().map(read).collect();
    let functions: BTreeSet<&str> =
        sources.split("fn ").filter_map(|rest| rest.split(['(', '<']).next()).collect();
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| |"))
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    let numbers: Vec<String> = rows.iter().map(|row| row[1].to_owned()).collect();
    assert_eq!(numbers, (1..=77).map(|number| number.to_string()).collect::<Vec<_>>());
    for row in rows {
        let [_, number, _, _, tests, remark, _] = row[..] else { panic!("{row:?}") };
        assert!(!tests.is_empty() || !remark.is_empty(), "{number}: neither a test nor a reason");
        for name in tests.split('`').skip(1).step_by(2) {
            assert!(functions.contains(name), "{number}: there is no test {name}");
        }
    }
}
