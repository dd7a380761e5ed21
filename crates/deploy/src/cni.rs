//! The network configuration that the agent writes for the container runtime.

use std::fmt;
use std::str::FromStr;

use serde_json::{Value, json};
use thiserror::Error;

/// The name of the file. Runtimes use the first file in the order of names, and packages of runtimes bring files that begin
/// with 10. A pod that another plugin connects has no policy.
pub const CNI_CONFIG_FILE: &str = "00-tortie.conflist";
/// The plugin's name in the runtime's folder.
pub const CNI_PLUGIN: &str = "tortie-cni";
/// The network's name, which begins the names of IPAM handles, as in Calico.
pub const CNI_NETWORK: &str = "k8s-pod-network";

/// The version of the protocol that all released plugins know.
const OLD_VERSION: &str = "1.0.0";
/// The version with GC and STATUS.
const NEW_VERSION: &str = "1.1.0";

/// The configuration, with the plugins that the runtime calls after Tortie's.
///
/// Runtimes of CNI 1.1 choose the highest of `cniVersions`; older ones use `cniVersion`. Chained plugins may be older, so the
/// runtime then uses the version that all of them know.
#[must_use]
pub fn cni_config(chained: &ChainedPlugins) -> Value {
    let plugins: Vec<Value> =
        [json!({"type": CNI_PLUGIN})].into_iter().chain(chained.0.iter().cloned()).collect();
    let mut config = json!({"cniVersion": OLD_VERSION, "name": CNI_NETWORK, "plugins": plugins});
    if chained.0.is_empty() {
        config["cniVersions"] = json!([OLD_VERSION, NEW_VERSION]);
    }
    config
}

/// Plugins that the runtime calls after Tortie's, as they stand in the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChainedPlugins(Vec<Value>);

/// Why a list of plugins cannot be chained.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0}; use a JSON list such as [{{\"type\": \"bandwidth\", \"capabilities\": {{\"bandwidth\": true}}}}]"
)]
pub struct ChainError(String);

impl ChainedPlugins {
    /// Whether a plugin of this type is in the list.
    #[must_use]
    pub fn has(&self, kind: &str) -> bool {
        self.0.iter().any(|plugin| plugin["type"] == kind)
    }

    /// Whether the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for ChainedPlugins {
    type Err = ChainError;

    /// Reads a JSON list of plugin configurations. Empty text is an empty list.
    fn from_str(text: &str) -> Result<Self, ChainError> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let plugins: Vec<Value> =
            serde_json::from_str(text).map_err(|error| ChainError(error.to_string()))?;
        for plugin in &plugins {
            let name = plugin["type"].as_str().unwrap_or_default();
            let problem = match name {
                "" => "a plugin has no type".to_owned(),
                CNI_PLUGIN => format!("{CNI_PLUGIN} is always the first plugin"),
                "portmap" => "Tortie serves hostPort itself, and portmap would do it again".to_owned(),
                name if name.contains('/') => format!("the type {name:?} is no file name"),
                _ => continue,
            };
            return Err(ChainError(problem));
        }
        Ok(Self(plugins))
    }
}

impl fmt::Display for ChainedPlugins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Value::Array(self.0.clone()).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chained_plugins_follow_and_the_runtime_speaks_the_version_of_all() {
        let alone = cni_config(&ChainedPlugins::default());
        assert_eq!(alone["plugins"], json!([{"type": "tortie-cni"}]));
        assert_eq!(alone["cniVersions"], json!(["1.0.0", "1.1.0"]));
        let text = r#"[{"type": "bandwidth", "capabilities": {"bandwidth": true}}, {"type": "tuning"}]"#;
        let chained: ChainedPlugins = text.parse().unwrap();
        assert!(chained.has("tuning") && !chained.has("sbr"));
        let config = cni_config(&chained);
        assert_eq!(config["plugins"][1]["capabilities"], json!({"bandwidth": true}));
        assert_eq!((config["plugins"].as_array().unwrap().len(), &config["cniVersions"]), (3, &Value::Null));
        assert_eq!(chained.to_string().parse(), Ok(chained));
        assert_eq!("".parse(), Ok(ChainedPlugins::default()));
    }

    #[test]
    fn lists_that_cannot_work_are_rejected() {
        for (text, expected) in [
            ("bandwidth", "expected value"),
            ("{}", "invalid type"),
            ("[{}]", "no type"),
            ("[\"bandwidth\"]", "no type"),
            (r#"[{"type": "tortie-cni"}]"#, "always the first"),
            (r#"[{"type": "portmap"}]"#, "hostPort itself"),
            (r#"[{"type": "../x"}]"#, "no file name"),
        ] {
            let problem = text.parse::<ChainedPlugins>().unwrap_err().to_string();
            assert!(problem.contains(expected) && problem.contains("use a JSON list"), "{text}: {problem}");
        }
    }
}
