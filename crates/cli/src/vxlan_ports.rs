//! The UDP ports of VXLAN, by FelixConfiguration.

use std::collections::BTreeSet;

use tortie_api::calico::FelixConfigurationSpec;
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::Snapshot;

/// The port between this node and others.
pub(crate) fn of_node(snapshot: &Snapshot, node: &str) -> u16 {
    let of = |name: &str| spec(snapshot, &Key::global(Kind::FelixConfiguration, name)).unwrap_or_default();
    of(&format!("node.{node}")).or(&of("default")).vxlan_port()
}

/// The ports to which pods send no VXLAN packets.
pub(crate) fn closed_to_pods(snapshot: &Snapshot) -> BTreeSet<u16> {
    let felix = snapshot.iter().filter_map(|(key, stored)| match &stored.resource {
        Ok(Resource::FelixConfiguration(felix)) => Some((key.name.as_str(), &felix.spec)),
        _ => None,
    });
    FelixConfigurationSpec::vxlan_ports(felix)
}

fn spec(snapshot: &Snapshot, key: &Key) -> Option<FelixConfigurationSpec> {
    match &snapshot.get(key)?.resource {
        Ok(Resource::FelixConfiguration(felix)) => Some(felix.spec.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_port_of_a_node_is_its_own_or_that_of_all() {
        let mut snapshot = Snapshot::new();
        let mut set = |name: &str, port: Value| {
            let value = json!({"metadata": {"name": name}, "spec": {"vxlanPort": port}});
            snapshot.insert(Key::global(Kind::FelixConfiguration, name), value, None);
            let ports = closed_to_pods(&snapshot).into_iter().collect::<Vec<_>>();
            (of_node(&snapshot, "one"), of_node(&snapshot, "two"), ports)
        };
        assert_eq!(set("other", json!(9999)), (4789, 4789, vec![4789]), "the name belongs to no node");
        assert_eq!(set("default", json!(8472)), (8472, 8472, vec![4789, 8472]));
        assert_eq!(set("node.one", json!(4790)), (4790, 8472, vec![4789, 4790, 8472]));
        // 0 is none, and not the port of all.
        assert_eq!(set("node.one", json!(0)), (4789, 8472, vec![4789, 8472]));
    }
}
