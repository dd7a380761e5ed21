//! The entries of pods' ports of the node.

use std::net::IpAddr;

use tortie_dataplane::{Endpoint, EndpointId};
use tortie_kernel::nftables::{Key, Value};

use super::{DesiredTable, HostPortKey, Pod};
use crate::dataplane::change::Change;
use crate::dataplane::host_ports::{self, Entry, SetNames};
use crate::dataplane::sets::Family;

impl DesiredTable {
    /// Adds the entries of a pod's ports of the node, and returns their keys.
    pub(super) fn take_host_ports(
        &mut self,
        id: &EndpointId,
        endpoint: &Endpoint,
        change: &mut Change,
    ) -> Vec<HostPortKey> {
        let mut keys = Vec::new();
        for Entry { family, key, pod, pod_port } in host_ports::entries(endpoint) {
            self.host_ports.entry((family, key)).or_default().insert(id.clone(), (pod, pod_port));
            self.put_host_port(family, key, change);
            put_pod(pod, true, change);
            keys.push((family, key));
        }
        keys
    }

    /// Removes the entries of a pod.
    pub(super) fn give_host_ports_up(&mut self, id: &EndpointId, pod: &Pod, change: &mut Change) {
        for (family, key) in &pod.host_ports {
            if let Some(pods) = self.host_ports.get_mut(&(*family, *key)) {
                if let Some((address, _)) = pods.remove(id) {
                    put_pod(address, false, change);
                }
                if pods.is_empty() {
                    self.host_ports.remove(&(*family, *key));
                }
            }
            self.put_host_port(*family, *key, change);
        }
    }

    /// Leads a port of the node to the first pod that wants it.
    fn put_host_port(&self, family: Family, key: Key, change: &mut Change) {
        let first = self.host_ports.get(&(family, key)).and_then(|pods| pods.values().next());
        let (address, port) = first.map(|(address, port)| host_ports::values(*address, *port)).unzip();
        let SetNames { addresses, ports, pods: _ } = host_ports::set_names(family);
        let value = |data| Value::new(None, Some(data));
        change.element(addresses, || host_ports::address_map(family), key, address.map(value));
        change.element(ports, || host_ports::port_map(family), key, port.map(value));
    }
}

fn put_pod(address: IpAddr, there: bool, change: &mut Change) {
    let family = Family::of(address);
    if let Some(key) = host_ports::pair(address) {
        let name = host_ports::set_names(family).pods;
        change.element(name, || host_ports::pod_pairs(family), key, there.then(Value::default));
    }
}
