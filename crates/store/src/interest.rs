//! What a client wants to know of a kind.

use serde_json::Value;
use tortie_api::{Key, Kind};

/// Some objects of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interest {
    /// The kind.
    pub kind: Kind,
    /// Which of its objects.
    pub scope: Scope,
}

/// Which objects of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All of them.
    All,
    /// Those of a node: its pods, endpoints, blocks and affinities; of other kinds, the object with its name.
    Node(String),
    /// Those in a namespace.
    Namespace(String),
    /// The object of this namespace (empty for kinds without) and name.
    Name(String, String),
}

impl Interest {
    /// In all objects of a kind.
    #[must_use]
    pub fn all(kind: Kind) -> Self {
        Self { kind, scope: Scope::All }
    }

    /// In what a node has of a kind.
    #[must_use]
    pub fn of_node(kind: Kind, node: &str) -> Self {
        Self { kind, scope: Scope::Node(node.to_owned()) }
    }

    /// In one object.
    #[must_use]
    pub fn in_object(key: &Key) -> Self {
        Self { kind: key.kind, scope: Scope::Name(key.namespace.clone(), key.name.clone()) }
    }

    /// Whether the object is one of them.
    #[must_use]
    pub fn covers(&self, key: &Key, value: &Value) -> bool {
        key.kind == self.kind
            && match &self.scope {
                Scope::All => true,
                Scope::Node(node) => is_of_node(key, value, node),
                Scope::Namespace(namespace) => key.namespace == *namespace,
                Scope::Name(namespace, name) => key.namespace == *namespace && key.name == *name,
            }
    }
}

fn is_of_node(key: &Key, value: &Value, node: &str) -> bool {
    match key.kind {
        Kind::Pod => value["spec"]["nodeName"] == node,
        Kind::WorkloadEndpoint | Kind::HostEndpoint => value["spec"]["node"] == node,
        // `libcalico-go/lib/backend/model/block.go`: `host:<node>`.
        Kind::IpamBlock => {
            value["affinity"].as_str().and_then(|affinity| affinity.strip_prefix("host:")) == Some(node)
        }
        // The name is `<node>/<CIDR>`.
        Kind::BlockAffinity => key.name.split_once('/').is_some_and(|(of, _)| of == node),
        _ => key.name == node,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_interest_covers_what_its_scope_says() {
        let all = |kind| Interest::all(kind);
        let node = |kind| Interest::of_node(kind, "one");
        let pod = Key::namespaced(Kind::Pod, "n", "p");
        let block = Key::global(Kind::IpamBlock, "10.0.0.0/26");
        let in_namespace =
            |name: &str| Interest { kind: Kind::Pod, scope: Scope::Namespace(name.to_owned()) };
        let table = [
            (all(Kind::Pod), &pod, json!({}), true),
            (all(Kind::Node), &pod, json!({}), false),
            (node(Kind::Pod), &pod, json!({"spec": {"nodeName": "one"}}), true),
            (node(Kind::Pod), &pod, json!({"spec": {"nodeName": "two"}}), false),
            (node(Kind::Pod), &pod, json!("damaged"), false),
            (node(Kind::IpamBlock), &block, json!({"affinity": "host:one"}), true),
            (node(Kind::IpamBlock), &block, json!({"affinity": "host:two"}), false),
            (node(Kind::IpamBlock), &block, json!({"affinity": null}), false),
            (
                node(Kind::BlockAffinity),
                &Key::global(Kind::BlockAffinity, "one/10.0.0.0/26"),
                json!({}),
                true,
            ),
            (
                node(Kind::BlockAffinity),
                &Key::global(Kind::BlockAffinity, "one-more/10.0.0.0/26"),
                json!({}),
                false,
            ),
            (node(Kind::Node), &Key::global(Kind::Node, "one"), json!({}), true),
            (node(Kind::Node), &Key::global(Kind::Node, "two"), json!({}), false),
            (in_namespace("n"), &pod, json!({}), true),
            (in_namespace("m"), &pod, json!({}), false),
            (Interest::in_object(&pod), &pod, json!({}), true),
            (Interest::in_object(&pod), &Key::namespaced(Kind::Pod, "m", "p"), json!({}), false),
        ];
        for (interest, key, value, expected) in table {
            assert_eq!(interest.covers(key, &value), expected, "{interest:?}: {key} {value}");
        }
    }
}
