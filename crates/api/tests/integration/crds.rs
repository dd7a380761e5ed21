//! Compares deploy/crds with the types and tables of the program.

use std::collections::BTreeMap;
use std::path::Path;

use tortie_api::Kind;

/// `UPDATE_CRDS=1 cargo test -p tortie-api --test integration crds::` rewrites the files.
#[test]
fn the_definitions_are_as_the_types_and_tables_are() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
    let expected: BTreeMap<String, String> = crate::schema::files().into_iter().collect();
    if std::env::var_os("UPDATE_CRDS").is_some() {
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in &expected {
            std::fs::write(folder.join(name), text).unwrap();
        }
    }
    let files = std::fs::read_dir(&folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read_to_string(&path).unwrap())
    });
    let found: BTreeMap<String, String> = files.collect();
    let names = |files: &BTreeMap<String, String>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
    for (name, text) in &expected {
        assert!(
            found[name] == *text,
            "deploy/crds/{name} is not up to date: UPDATE_CRDS=1 cargo test -p tortie-api --test integration crds::"
        );
    }
}

/// The other kinds are Kubernetes' own, or have definitions of other projects, or are derived from Namespaces,
/// ServiceAccounts and Pods.
#[test]
fn every_kind_of_calico_and_tortie_has_a_definition() {
    let derived = [Kind::Profile, Kind::WorkloadEndpoint];
    let wanted = Kind::all().filter(|kind| {
        ["projectcalico.org/v3", "tortie.io/v1"].contains(&kind.api_version()) && !derived.contains(kind)
    });
    let mut wanted: Vec<&str> = wanted.map(Kind::plural).collect();
    let files = crate::schema::files();
    let mut found: Vec<&str> =
        files.iter().map(|(name, _)| name.split(['_', '.']).rev().nth(1).unwrap()).collect();
    wanted.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, wanted);
}
