//! Text that stands for other text: templates of Helm and Go, and variables that another program replaces.

use serde_json::Value;

/// The first template action (`{{ … }}`) or variable (`${NAME}`) in a text. `$(NAME)` is none: Kubernetes itself replaces it.
pub(crate) fn first(text: &str) -> Option<&str> {
    let action = text.find("{{").map(|begin| (begin, "}}"));
    let variable = text.match_indices("${").map(|(begin, _)| (begin, "}")).find(|(begin, _)| {
        let name = text.get(begin + 2..).unwrap_or_default();
        name.starts_with(|first: char| first.is_ascii_alphabetic() || "_{".contains(first))
    });
    let (begin, end) = action.into_iter().chain(variable).min()?;
    let rest = text.get(begin..)?;
    let length = rest.find(end).map_or(rest.len(), |at| at + end.len());
    rest.get(..length)
}

/// Fields that no verdict depends on, and that often hold scripts and templates of their own.
const IRRELEVANT: [&str; 17] = [
    "annotations",
    "args",
    "command",
    "data",
    "description",
    "env",
    "envFrom",
    "image",
    "lifecycle",
    "livenessProbe",
    "readinessProbe",
    "resources",
    "startupProbe",
    "status",
    "stringData",
    "volumeMounts",
    "volumes",
];

/// The first field that holds a placeholder and may matter to a verdict: its path, and the placeholder.
pub(crate) fn first_in(value: &Value, path: &str) -> Option<(String, String)> {
    match value {
        Value::String(text) => first(text).map(|found| (path.to_owned(), found.to_owned())),
        Value::Array(items) => {
            items.iter().enumerate().find_map(|(index, item)| first_in(item, &format!("{path}[{index}]")))
        }
        Value::Object(fields) => fields
            .iter()
            .filter(|(name, _)| !IRRELEVANT.contains(&name.as_str()))
            .find_map(|(name, field)| {
                let dot = if path.is_empty() { "" } else { "." };
                let path = format!("{path}{dot}{name}");
                first(name).map(|found| (path.clone(), found.to_owned())).or_else(|| first_in(field, &path))
            }),
        _ => None,
    }
}

/// The remedy for a text with a placeholder.
pub(crate) fn remedy(placeholder: &str) -> String {
    match placeholder.starts_with("{{") {
        true => format!(
            "{placeholder} is a template of Helm or Go: render it, for instance with helm template CHART | tortie … -f -"
        ),
        false => format!(
            "{placeholder} is a variable that another program replaces: replace it, for instance with envsubst < FILE | tortie … -f -"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_found() {
        for (text, expected) in [
            ("{{ .Release.Namespace }}-x", Some("{{ .Release.Namespace }}")),
            ("a-${NAME}", Some("${NAME}")),
            ("a-${name:-x} {{ y }}", Some("${name:-x}")),
            ("${{NUMBER}}", Some("${{NUMBER}")),
            ("${", None),
            ("$(NAME)", None),
            ("$NAME", None),
            ("{a}", None),
            ("{{ open", Some("{{ open")),
        ] {
            assert_eq!(first(text), expected, "{text}");
        }
        let value =
            serde_json::json!({"spec": {"containers": [{"args": ["${A}"], "ports": [{"name": "${B}"}]}]}});
        let found = first_in(&value, "");
        assert_eq!(found, Some(("spec.containers[0].ports[0].name".to_owned(), "${B}".to_owned())));
    }
}
