//! What fuzzing has found: manifests and stored objects that needed too much memory or time, or caused a panic.

use serde_json::json;
use tortie_api::ipam::Block;
use tortie_api::manifest::read;
use tortie_api::to_yaml;

/// The path of each field has the names of all that contain it. Lines of very long paths are those of what contains the field.
#[test]
fn lines_of_fields_below_very_long_names_take_no_more_memory_than_the_file() {
    let (name, items) = ("x".repeat(10_000), "      - 1\n".repeat(200));
    let text = format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: 'n'}}\nstatus:\n  extra:\n    ? {name}\n    :\n{items}  last: 1\n"
    );
    let objects = read("m.yml", &text).unwrap();
    let line = |field: &str| objects[0].lines.of(&format!("status.{field}"));
    assert_eq!(line(&format!("extra.{name}")), 6);
    assert_eq!(line(&format!("extra.{name}[0]")), 8);
    assert_eq!(line(&format!("extra.{name}[199]")), 6);
    assert_eq!(line("last"), 208);
}

/// YAML allows no more than 1,024 characters before a colon, unless a question mark comes first.
#[test]
fn very_long_names_of_fields_are_written_as_they_are_read() {
    for name in ["x".repeat(1_100), "\u{1c}".repeat(400)] {
        let value = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "annotations": {&name: "a", "b": "c"}},
            "status": {"extra": [{&name: {&name: [1, {&name: []}]}}]},
        });
        let objects = read("m.yml", &to_yaml(&value)).unwrap();
        assert_eq!(objects[0].value, value);
    }
}

/// A description of the object is part of each of its problems.
#[test]
fn a_very_long_name_is_not_repeated_in_each_problem() {
    let fields: String = (0..50).map(|number| format!("unknown{number}: 1\n")).collect();
    let (name, kind) = ("n".repeat(10_000), "kind: GlobalNetworkPolicy");
    let text = format!("apiVersion: projectcalico.org/v3\n{kind}\nmetadata: {{name: {name}}}\n{fields}");
    let problems = read("m.yml", &text).unwrap_err();
    assert!(problems.len() >= 50, "{}", problems.len());
    assert!(problems.iter().all(|problem| problem.object.len() < 500), "{}", problems[0].object.len());
    assert!(problems[0].object.ends_with('…'), "{}", problems[0].object);
}

/// Each anchor keeps a copy of its value, and those of nested anchors are copies of copies.
#[test]
fn nested_anchors_count_as_aliases_do() {
    let values = format!("[{}]", "1,".repeat(500));
    let text = |anchors: usize| {
        let begin: String = (0..anchors).map(|number| format!("[&a{number} ")).collect();
        format!(
            "apiVersion: v1\nkind: Node\nmetadata: {{name: 'n'}}\nstatus: {{extra: {begin}{values}{}}}\n",
            "]".repeat(anchors)
        )
    };
    assert!(read("m.yml", &text(3)).is_ok());
    let problems = read("m.yml", &text(50)).unwrap_err();
    assert!(problems[0].problem.contains("behind anchors and aliases"), "{problems:?}");
}

/// Only the equality of sequence numbers means something, and `renew` takes at least the time.
#[test]
fn a_block_with_the_last_sequence_number_can_be_written() {
    let mut block: Block = serde_json::from_value(json!({
        "cidr": "10.0.0.0/30", "affinity": "host:n", "allocations": [0, null, null, null], "unallocated": [1, 2, 3],
        "attributes": [{"handle_id": "h"}], "sequenceNumber": u64::MAX,
    }))
    .unwrap();
    block.check().unwrap();
    block.bump();
    assert_eq!(block.sequence_number, 0);
    block.sequence_number = u64::MAX;
    assert_eq!(block.release("h", None).len(), 1);
    block.renew([10, 0, 0, 1].into(), 7);
    assert_eq!(block.sequence_number, 8);
    block.check().unwrap();
}
