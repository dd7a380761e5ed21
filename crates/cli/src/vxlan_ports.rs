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

/// The ports to which pods of some node send no VXLAN packets.
pub(crate) fn closed_to_pods(snapshot: &Snapshot) -> BTreeSet<u16> {
    let keys = snapshot.iter().map(|(key, _)| key).filter(|key| key.kind == Kind::FelixConfiguration);
    let configured = keys.filter_map(|key| Some(spec(snapshot, key)?.vxlan_port()));
    configured.chain([FelixConfigurationSpec::VXLAN_PORT]).collect()
}

fn spec(snapshot: &Snapshot, key: &Key) -> Option<FelixConfigurationSpec> {
    match &snapshot.get(key)?.resource {
        Ok(Resource::FelixConfiguration(felix)) => Some(felix.spec.clone()),
        _ => None,
    }
}
