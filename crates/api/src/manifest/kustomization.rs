//! Files that are no manifests, and say how manifests are made: kustomizations and charts. What they make is not what lies beside them.

use std::path::Path;

use serde_json::Value;

/// Fields of a kustomization that leave what it includes as it is, as far as verdicts are concerned.
const WITHOUT_EFFECT: [&str; 12] = [
    "apiVersion",
    "buildMetadata",
    "commonAnnotations",
    "configMapGenerator",
    "crds",
    "generatorOptions",
    "images",
    "kind",
    "metadata",
    "openapi",
    "resources",
    "secretGenerator",
];

/// The remedy, if this file makes other objects than those that lie beside it.
pub(super) fn remedy(file: &str, value: &Value) -> Option<String> {
    let name = Path::new(file).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let folder = match Path::new(file).parent().map(|folder| folder.display().to_string()) {
        Some(folder) if !folder.is_empty() => folder,
        _ => ".".to_owned(),
    };
    let text = |field: &str| value[field].as_str().unwrap_or_default();
    if name == "Chart.yaml" && value["name"].is_string() && text("kind").is_empty() {
        return Some(format!(
            "this is a chart of Helm, whose templates are no manifests: helm template {folder} | tortie … -f -"
        ));
    }
    let has_name = ["kustomization.yaml", "kustomization.yml", "Kustomization"].contains(&name);
    let is_kustomization = text("apiVersion").starts_with("kustomize.config.k8s.io/");
    if !(is_kustomization || has_name && text("kind").is_empty()) {
        return None;
    }
    let changes = changes(value);
    (!changes.is_empty()).then(|| {
        format!(
            "the kustomization makes other objects than those beside it ({}): tortie … -k {folder}",
            changes.join(", ")
        )
    })
}

/// Whether this file is a kustomization without `apiVersion` and `kind`, or a chart.
pub(super) fn is_nameless(file: &str) -> bool {
    let name = Path::new(file).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    ["kustomization.yaml", "kustomization.yml", "Chart.yaml"].contains(&name)
}

/// The fields by which a kustomization makes other objects.
fn changes(value: &Value) -> Vec<&str> {
    // A folder, or another place.
    let is_elsewhere = |resource: &Value| {
        resource.as_str().is_none_or(|name| {
            let name = name.strip_prefix("./").unwrap_or(name);
            let is_file = [".yaml", ".yml", ".json"].iter().any(|end| name.ends_with(end));
            !is_file || name.contains('/') || name.contains(':')
        })
    };
    let fields = value.as_object().into_iter().flatten();
    let has_effect = |(name, field): &(&String, &Value)| match name.as_str() {
        "resources" => field.as_array().is_none_or(|all| all.iter().any(is_elsewhere)),
        name => !WITHOUT_EFFECT.contains(&name),
    };
    fields.filter(has_effect).map(|(name, _)| name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_makes_objects_names_the_way_to_make_them() {
        let of_kustomize = |field: &str, content: Value| json!({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", (field): content});
        let transforming = "the kustomization makes other objects than those beside it";
        for (file, value, expected) in [
            ("a/k.yaml", of_kustomize("namespace", json!("shop")), Some(transforming)),
            ("a/k.yaml", of_kustomize("patches", json!([])), Some(transforming)),
            ("a/k.yaml", of_kustomize("resources", json!(["web.yaml", "./db.yml"])), None),
            ("a/k.yaml", of_kustomize("resources", json!(["../base"])), Some(transforming)),
            (
                "a/k.yaml",
                of_kustomize("resources", json!(["https://example.org/x.yaml"])),
                Some(transforming),
            ),
            ("a/k.yaml", of_kustomize("images", json!([])), None),
            ("kustomization.yaml", json!({"namePrefix": "x-"}), Some("tortie … -k .")),
            ("values.yaml", json!({"namePrefix": "x-"}), None),
            (
                "charts/web/Chart.yaml",
                json!({"apiVersion": "v2", "name": "web"}),
                Some("helm template charts/web |"),
            ),
            ("a/p.yaml", json!({"apiVersion": "v1", "kind": "Pod", "namespace": "x"}), None),
        ] {
            let found = remedy(file, &value);
            match (&found, expected) {
                (Some(found), Some(expected)) => assert!(found.contains(expected), "{file} {value}: {found}"),
                (found, expected) => {
                    assert!(found.is_none() && expected.is_none(), "{file} {value}: {found:?}")
                }
            }
        }
    }
}
