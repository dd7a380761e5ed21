//! A model of Calico's client for etcd (`libcalico-go/lib/clientv3` and `lib/backend/etcdv3` of v3.32): what it needs to find in an object to
//! read it under its name, to update it, and to apply policy to it.

use serde_json::Value;

const RESOURCES: &str = "/calico/resources/v3/projectcalico.org/";
/// The folders of policies that belong to tiers.
const TIERED: [&str; 4] =
    ["networkpolicies", "globalnetworkpolicies", "stagednetworkpolicies", "stagedglobalnetworkpolicies"];

/// What Calico's client cannot do with a value, each with its reason. Keys outside of Calico's resources have no problems.
#[must_use]
pub fn problems(key: &str, value: &Value) -> Vec<String> {
    let Some(rest) = key.strip_prefix(RESOURCES) else { return Vec::new() };
    let parts: Vec<&str> = rest.split('/').collect();
    let (folder, namespace, name) = match parts[..] {
        [folder, name] => (folder, "", name),
        [folder, namespace, name] => (folder, namespace, name),
        _ => return vec![format!("{key} is the key of no resource")],
    };
    let mut problems = Vec::new();
    let mut expect = |holds: bool, problem: &str| {
        if !holds {
            problems.push(format!("{key}: {problem}: {value}"));
        }
    };
    let metadata = &value["metadata"];
    let text = |field: &str| metadata[field].as_str().unwrap_or_default();
    // `clientv3/resources.go`, `Update`.
    expect(text("uid").len() == 36, "an update fails without metadata.uid");
    expect(
        text("creationTimestamp").len() == 20 && text("creationTimestamp").ends_with('Z'),
        "an update fails without metadata.creationTimestamp",
    );
    expect(metadata.get("resourceVersion").is_none(), "a stored object has no metadata.resourceVersion");
    expect(value["apiVersion"] == "projectcalico.org/v3", "the API is another one");
    expect(value["kind"].is_string(), "it has no kind");
    expect(text("namespace") == namespace, "the key is of another namespace");
    if TIERED.contains(&folder) {
        let tier = value["spec"]["tier"].as_str().unwrap_or_default();
        expect(!tier.is_empty(), "the tier is shown as none without spec.tier");
        expect(metadata["labels"]["projectcalico.org/tier"] == tier, "the label of the tier is missing");
        let kept = metadata["annotations"]["projectcalico.org/metadata"].as_str().unwrap_or_default();
        let kept: Value = serde_json::from_str(kept).unwrap_or_default();
        expect(
            kept["name"] == text("name"),
            "without the annotation, a name that begins with `default.` is cut",
        );
        let is_key = text("name") == name || format!("{tier}.{}", text("name")) == name;
        expect(is_key, "the key is of another name");
    } else {
        expect(text("name") == name, "the key is of another name");
    }
    if folder == "workloadendpoints" {
        let label = |name: &str| &metadata["labels"][format!("projectcalico.org/{name}")];
        expect(
            *label("namespace") == namespace,
            "Felix applies no policy of the namespace without the label",
        );
        expect(
            *label("orchestrator") == value["spec"]["orchestrator"],
            "the label of the orchestrator is missing",
        );
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// An object as calicoctl stores it has no problem, and each change of it has one.
    #[test]
    fn each_rule_is_needed() {
        let policy = json!({"apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy",
            "metadata": {"name": "p", "namespace": "n", "uid": "9d6ba87f-0000-4000-8000-000000000000",
                "creationTimestamp": "2026-11-29T00:00:00Z", "labels": {"projectcalico.org/tier": "t"},
                "annotations": {"projectcalico.org/metadata": "{\"name\":\"p\"}"}},
            "spec": {"tier": "t"}});
        let key = |name: &str| format!("{RESOURCES}networkpolicies/n/{name}");
        assert_eq!(problems(&key("p"), &policy), [""; 0]);
        assert_eq!(problems(&key("t.p"), &policy), [""; 0], "as before v3.32");
        assert_eq!(problems("/calico/ipam/v2/config", &json!({})), [""; 0]);
        assert_eq!(problems(&key("q"), &policy).len(), 1);
        for (pointer, changed) in [
            ("/metadata/uid", json!(null)),
            ("/metadata/creationTimestamp", json!("")),
            ("/apiVersion", json!("v1")),
            ("/kind", json!(null)),
            ("/metadata/namespace", json!("m")),
            ("/metadata/labels", json!({})),
            ("/metadata/annotations", json!({})),
        ] {
            let mut damaged = policy.clone();
            *damaged.pointer_mut(pointer).unwrap() = changed;
            assert_eq!(problems(&key("p"), &damaged).len(), 1, "{pointer}");
        }
        let mut endpoint = policy;
        endpoint["spec"] = json!({"orchestrator": "k8s"});
        assert_eq!(problems(&format!("{RESOURCES}workloadendpoints/n/p"), &endpoint).len(), 2);
        assert_eq!(problems(&format!("{RESOURCES}tiers"), &endpoint).len(), 1);
    }
}
