//! Names of nodes as people and machines write them.

use std::str::FromStr;

/// The name of a Node: without blanks around it and in lower case, as kubelets and Calico take it. Windows has the name of the machine in upper
/// case (`COMPUTERNAME`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeName {
    name: String,
    given: String,
}

impl FromStr for NodeName {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        match given.trim().to_lowercase() {
            name if name.is_empty() => Err("the name of a node is empty".to_owned()),
            name => Ok(Self { name, given: given.to_owned() }),
        }
    }
}

impl NodeName {
    pub(crate) fn as_str(&self) -> &str {
        &self.name
    }

    /// Logs that it is another name than the given one.
    pub(crate) fn log_change(&self) {
        if self.name != self.given {
            tracing::warn!(
                given = self.given,
                node = self.name,
                "names of nodes are in lower case and without blanks"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_kubelets() {
        for (given, expected) in [
            ("node-1", Some("node-1")),
            ("PRIMARY", Some("primary")),
            (" Node-1.Example\r\n", Some("node-1.example")),
            ("", None),
            (" ", None),
        ] {
            let name = given.parse::<NodeName>();
            assert_eq!(name.as_ref().ok().map(NodeName::as_str), expected, "{given:?}");
        }
    }
}
