//! The entries of pods' ports of the node.

use std::net::{IpAddr, Ipv4Addr};

use tortie_dataplane::{Endpoint, EndpointId};
use tortie_kernel::nftables::{Data, Key, Value};

use super::{DesiredTable, Pod};
use crate::dataplane::change::Change;
use crate::dataplane::host_ports::{self, ADDRESSES, PODS, PORTS};

impl DesiredTable {
    /// Adds the entries of a pod's ports of the node, and returns their keys.
    pub(super) fn take_host_ports(
        &mut self,
        id: &EndpointId,
        endpoint: &Endpoint,
        change: &mut Change,
    ) -> Vec<Key> {
        let Some(address) = ipv4(&endpoint.addresses) else { return Vec::new() };
        let mut keys = Vec::new();
        for (key, port) in host_ports::keys(endpoint) {
            self.host_ports.entry(key).or_default().insert(id.clone(), (address, port.pod_port));
            self.put_host_port(&key, change);
            keys.push(key);
        }
        if !keys.is_empty() {
            put_pod(address, true, change);
        }
        keys
    }

    /// Removes the entries of a pod.
    pub(super) fn give_host_ports_up(&mut self, id: &EndpointId, pod: &Pod, change: &mut Change) {
        for key in &pod.host_ports {
            if let Some(pods) = self.host_ports.get_mut(key) {
                pods.remove(id);
                if pods.is_empty() {
                    self.host_ports.remove(key);
                }
            }
            self.put_host_port(key, change);
        }
        if let (false, Some(address)) = (pod.host_ports.is_empty(), ipv4(&pod.addresses)) {
            put_pod(address, false, change);
        }
    }

    /// Leads a port of the node to the first pod that wants it.
    fn put_host_port(&self, key: &Key, change: &mut Change) {
        let first = self.host_ports.get(key).and_then(|pods| pods.values().next());
        let values = first.map(|(address, port)| host_ports::values(*address, *port));
        for (map, value) in
            [(ADDRESSES, values.map(|(address, _)| address)), (PORTS, values.map(|(_, port)| port))]
        {
            let value = value.map(|number| Value::new(None, Some(Data::Number(number))));
            change.element(map, host_ports::map, *key, value);
        }
    }
}

fn put_pod(address: Ipv4Addr, there: bool, change: &mut Change) {
    if let Some(key) = host_ports::pair(address) {
        change.element(PODS, host_ports::pods, key, there.then(Value::default));
    }
}

fn ipv4(addresses: &[IpAddr]) -> Option<Ipv4Addr> {
    addresses.iter().find_map(|address| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    })
}
