//! A real API server takes the definitions of deploy/crds, keeps what Calico's objects hold, and rejects values of another
//! type.

use serde_json::{Value, json};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};

#[test]
fn a_real_api_server_takes_the_definitions_and_their_objects() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let kube = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    every_definition_is_structural(&kube);
    objects_are_kept_unchanged(&kube);
    wrong_values_are_rejected(&kube);
}

/// The API server reports what makes a schema useless to it, instead of rejecting the definition.
fn every_definition_is_structural(kube: &KubeApi) {
    let definitions = json_of(&kube.kubectl(&["get", "crds", "-o", "json"]).unwrap());
    let definitions = definitions["items"].as_array().unwrap();
    assert_eq!(definitions.len(), 23);
    for definition in definitions {
        let conditions = definition["status"]["conditions"].as_array().unwrap();
        let is = |wanted: &str| {
            conditions.iter().any(|condition| condition["type"] == wanted && condition["status"] == "True")
        };
        assert!(is("Established") && is("NamesAccepted") && !is("NonStructuralSchema"), "{definition:#}");
    }
}

/// Nothing is added, dropped or rewritten, also not in fields of later versions of Calico.
fn objects_are_kept_unchanged(kube: &KubeApi) {
    for (kind, spec) in crate::crd_samples::complete() {
        let name = kind.to_lowercase();
        let object = object(kind, &name, &spec);
        create(kube, &object).unwrap_or_else(|error| panic!("{kind}: {error}"));
        let stored = json_of(&kube.kubectl(&["get", &resource(kind), &name, "-o", "json"]).unwrap());
        assert_eq!(stored["spec"], object["spec"], "{kind}");
        assert_eq!(stored["metadata"]["annotations"], object["metadata"]["annotations"], "{kind}");
        assert_eq!(stored["status"], object["status"], "{kind}");
    }
}

fn wrong_values_are_rejected(kube: &KubeApi) {
    for (kind, spec, field) in crate::crd_samples::wrong() {
        let error = create(kube, &object(kind, "wrong", &spec));
        let error = error.map(|_| format!("{kind} {spec} is accepted")).unwrap_err().to_string();
        assert!(error.contains("is invalid") && error.contains(field), "{kind} {spec}: {error}");
    }
}

/// An object as Calico stores it: metadata that belong to Calico's own API are in an annotation.
fn object(kind: &str, name: &str, content: &Value) -> Value {
    let (group, field) =
        if kind == "NodeReport" { ("tortie.io", "status") } else { ("crd.projectcalico.org", "spec") };
    let mut object = json!({
        "apiVersion": format!("{group}/v1"),
        "kind": kind,
        "metadata": {"name": name, "annotations": {
            "projectcalico.org/metadata": "{\"labels\":{\"a\":\"b\"}}",
        }},
    });
    object[field] = content.clone();
    object
}

fn resource(kind: &str) -> String {
    let group = if kind == "NodeReport" { "tortie.io" } else { "crd.projectcalico.org" };
    format!("{}.v1.{group}", kind.to_lowercase())
}

fn create(kube: &KubeApi, object: &Value) -> Result<String, tortie_servers::Error> {
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    std::fs::write(file.path(), object.to_string()).unwrap();
    kube.kubectl(&["create", "-f", &file.path().display().to_string()])
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}
