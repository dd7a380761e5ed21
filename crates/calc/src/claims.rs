//! Addresses that only an annotation of a pod names (policy decision 50).
//!
//! On a Kubernetes API, the agent annotates a pod with its addresses, and the kubelet reports them later. Whoever may change
//! pods of a namespace can write the same annotation, and would get the rules and routes of the address. So until the kubelet
//! reports the addresses, each of them needs another witness:
//!
//! * this node's agent has given it to the pod;
//! * IPAM's block says that the pod has it, on its node. In a block, nothing else counts;
//! * outside of all blocks, on other nodes: no Node, no HostEndpoint and no reported pod has it. It then is only a member of
//!   sets. The same holds on this node if another plugin connects the pods, because it then leads to no route.
//!
//! A pod of a node that does not exist has no address.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::calico::WorkloadEndpointSpec;
use tortie_api::{Key, Kind};
use tortie_dataplane::Reason;
use tortie_policy::OwnLabels;

use crate::{Calc, Finding};

/// The endpoints whose addresses no kubelet has reported, and the witnesses for their addresses.
#[derive(Default)]
pub(crate) struct Claims {
    endpoints: BTreeMap<Key, Claim>,
    /// The endpoints that claim each address.
    by_address: BTreeMap<IpAddr, BTreeSet<Key>>,
    /// The pods that the agent of this node has connected.
    assigned: HashMap<Key, Assigned>,
    blocks: BlockPods,
    /// The endpoints that are to be judged again.
    dirty: BTreeSet<Key>,
}

/// An endpoint as it is stored.
struct Claim {
    own: OwnLabels,
    spec: WorkloadEndpointSpec,
    /// The addresses that belong to somebody else.
    refuted: BTreeMap<IpAddr, &'static str>,
}

/// The sandbox and the addresses that an agent has given to a pod of its own node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assigned {
    /// The sandbox.
    pub container_id: String,
    /// The addresses of the sandbox.
    pub addresses: BTreeSet<IpAddr>,
}

/// The pods to which IPAM has given addresses.
#[derive(Default)]
struct BlockPods {
    /// By block, in the order of the addresses: the hash of node, namespace and name. It is seeded, so nobody can look for pods of one hash.
    blocks: BTreeMap<IpNet, Box<[(IpAddr, u64)]>>,
    /// The number of blocks of each prefix length.
    lengths: BTreeMap<u8, usize>,
    seed: RandomState,
}

/// The pod to which a block gives an address. The names are empty for whatever is no pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PodOfBlock {
    pub(crate) address: IpAddr,
    pub(crate) node: String,
    pub(crate) namespace: String,
    pub(crate) pod: String,
}

/// The answer of IPAM's blocks to the claim of a pod.
#[derive(PartialEq)]
enum BlockSays {
    /// No block has it.
    Nothing,
    /// The pod has it.
    Yes,
    /// Nobody has it, for what this node knows.
    Free,
    Another,
}

impl BlockPods {
    fn put(&mut self, cidr: IpNet, pods: Option<Box<[(IpAddr, u64)]>>) {
        let count = self.lengths.entry(cidr.prefix_len()).or_default();
        let former = match pods {
            Some(pods) => {
                *count += 1;
                self.blocks.insert(cidr, pods)
            }
            None => self.blocks.remove(&cidr),
        };
        *count -= usize::from(former.is_some());
        if *count == 0 {
            self.lengths.remove(&cidr.prefix_len());
        }
    }

    fn hash(&self, node: &str, namespace: &str, pod: &str) -> u64 {
        self.seed.hash_one((node, namespace, pod))
    }

    /// The pods of the smallest block that has the address.
    fn block_of(&self, address: IpAddr) -> Option<&[(IpAddr, u64)]> {
        let lengths = self.lengths.range(..=IpNet::from(address).prefix_len()).rev();
        let mut nets = lengths.filter_map(|(length, _)| IpNet::new(address, *length).ok());
        nets.find_map(|net| self.blocks.get(&net.trunc())).map(|pods| &**pods)
    }

    fn say(&self, address: IpAddr, namespace: &str, spec: &WorkloadEndpointSpec) -> BlockSays {
        let Some(pods) = self.block_of(address) else { return BlockSays::Nothing };
        match pods.binary_search_by_key(&address, |(address, _)| *address) {
            Ok(index) if pods[index].1 == self.hash(&spec.node, namespace, &spec.pod) => BlockSays::Yes,
            Ok(_) => BlockSays::Another,
            Err(_) => BlockSays::Free,
        }
    }
}

impl Claims {
    /// Notes the pods of a block, in the order of their addresses; none if the block does not exist.
    pub(crate) fn update_block(&mut self, cidr: IpNet, pods: Option<&[PodOfBlock]>) {
        let hashed = |pod: &PodOfBlock| (pod.address, self.blocks.hash(&pod.node, &pod.namespace, &pod.pod));
        let pods: Option<Box<[_]>> = pods.map(|pods| pods.iter().map(hashed).collect());
        if self.blocks.blocks.get(&cidr) == pods.as_ref() {
            return;
        }
        self.blocks.put(cidr, pods);
        let touched = self.by_address.range(cidr.network()..=cidr.broadcast());
        self.dirty.extend(touched.flat_map(|(_, keys)| keys.iter().cloned()));
    }

    /// Something else has got this address, or lost it.
    pub(crate) fn mark(&mut self, address: IpAddr) {
        let claimed = self.by_address.get(&address);
        self.dirty.extend(claimed.into_iter().flatten().cloned());
    }

    /// A node has come, or is gone.
    pub(crate) fn mark_node(&mut self, name: &str) {
        let of_node = self.endpoints.iter().filter(|(_, claim)| claim.spec.node == name);
        self.dirty.extend(of_node.map(|(key, _)| key.clone()));
    }

    fn insert(&mut self, key: &Key, claim: Claim) {
        self.remove(key);
        for address in addresses(&claim.spec) {
            self.by_address.entry(address).or_default().insert(key.clone());
        }
        self.endpoints.insert(key.clone(), claim);
        self.dirty.insert(key.clone());
    }

    fn remove(&mut self, key: &Key) {
        let Some(claim) = self.endpoints.remove(key) else { return };
        self.dirty.remove(key);
        for address in addresses(&claim.spec) {
            if let Some(keys) = self.by_address.get_mut(&address) {
                keys.remove(key);
                if keys.is_empty() {
                    self.by_address.remove(&address);
                }
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let claims = self.endpoints.is_empty() && self.by_address.is_empty() && self.dirty.is_empty();
        let blocks = self.blocks.blocks.is_empty() && self.blocks.lengths.is_empty();
        claims && blocks && self.assigned.is_empty()
    }

    /// The addresses of other pods that endpoints of this node claim.
    pub(crate) fn findings(&self, node: &str) -> impl Iterator<Item = Finding> {
        let local = self.endpoints.iter().filter(move |(_, claim)| claim.spec.node == node);
        let refuted = local.filter(|(_, claim)| !claim.refuted.is_empty());
        refuted.map(|(key, claim)| {
            let all = claim.refuted.iter().map(|(address, owner)| format!("{address}, which {owner}"));
            let problem = format!(
                "an annotation of pod {}/{} names {}; the address does not count. Correct the annotation, or find out who writes it",
                key.namespace,
                claim.spec.pod,
                all.collect::<Vec<_>>().join(", and ")
            );
            Finding { key: key.clone(), reason: Reason::NotUnderstood, problem }
        })
    }
}

fn addresses(spec: &WorkloadEndpointSpec) -> impl Iterator<Item = IpAddr> {
    spec.ip_networks.iter().map(IpNet::addr)
}

impl Calc {
    /// Notes what the agent of this node has given to a pod before it publishes the pod's WorkloadEndpoint, which has this key; none
    /// when the pod loses it.
    pub fn update_assigned(&mut self, endpoint: &Key, assigned: Option<Assigned>) {
        match assigned {
            Some(assigned) => drop(self.claims.assigned.insert(endpoint.clone(), assigned)),
            None => drop(self.claims.assigned.remove(endpoint)),
        }
        if self.claims.endpoints.contains_key(endpoint) {
            self.claims.dirty.insert(endpoint.clone());
        }
    }

    /// Ingests an endpoint, whose addresses may be `unreported`.
    pub(crate) fn take_endpoint(
        &mut self,
        key: &Key,
        endpoint: Option<(OwnLabels, WorkloadEndpointSpec)>,
        unreported: bool,
    ) {
        // A claim may depend on the addresses that this endpoint has, or had.
        if !self.claims.by_address.is_empty() {
            let known = self.subjects.addresses_of(key);
            let given = endpoint.iter().flat_map(|(_, spec)| addresses(spec));
            known.into_iter().chain(given).for_each(|address| self.claims.mark(address));
        }
        match endpoint {
            Some((own, spec)) if unreported => {
                self.claims.insert(key, Claim { own, spec, refuted: BTreeMap::new() });
            }
            endpoint => {
                self.claims.remove(key);
                self.update_endpoint(
                    key,
                    endpoint.map(|(own, spec)| (own, self.with_own_sandbox(key, spec))),
                );
            }
        }
    }

    /// The endpoint with the sandbox that this node's agent knows, whatever the annotation says.
    fn with_own_sandbox(&self, key: &Key, mut spec: WorkloadEndpointSpec) -> WorkloadEndpointSpec {
        if let Some(assigned) = self.claims.assigned.get(key).filter(|_| spec.node == self.node) {
            spec.container_id.clone_from(&assigned.container_id);
        }
        spec
    }

    /// Lets those addresses of unreported endpoints count that have a witness. The others have no effect.
    pub(crate) fn judge_claims(&mut self) {
        let dirty = std::mem::take(&mut self.claims.dirty);
        if dirty.is_empty() {
            return;
        }
        let taken = self.taken_addresses(&dirty);
        for key in dirty {
            let Some(claim) = self.claims.endpoints.get(&key) else { continue };
            let (mut spec, own, mut refuted) = (claim.spec.clone(), claim.own.clone(), BTreeMap::new());
            let is_local = spec.node == self.node;
            if !is_local && !self.network.nodes().contains_key(&spec.node) {
                spec.ip_networks.clear();
            }
            let assigned = self.claims.assigned.get(&key).filter(|_| is_local);
            spec.ip_networks.retain(|net| {
                let address = net.addr();
                let by_other = match self.claims.blocks.say(address, &key.namespace, &claim.spec) {
                    _ if assigned.is_some_and(|assigned| assigned.addresses.contains(&address)) => {
                        return true;
                    }
                    BlockSays::Yes => return true,
                    BlockSays::Free => return false,
                    BlockSays::Another => Some("IPAM has given to another one"),
                    BlockSays::Nothing => taken.get(&address).copied(),
                };
                refuted.extend(by_other.map(|owner| (address, owner)));
                by_other.is_none() && (!is_local || self.network.policy_only)
            });
            let spec = self.with_own_sandbox(&key, spec);
            self.update_endpoint(&key, (!spec.ip_networks.is_empty()).then_some((own, spec)));
            if let Some(claim) = self.claims.endpoints.get_mut(&key) {
                claim.refuted = refuted;
            }
        }
    }

    /// Those addresses of these endpoints that a Node or a reported pod has.
    fn taken_addresses(&self, endpoints: &BTreeSet<Key>) -> HashMap<IpAddr, &'static str> {
        let claims = endpoints.iter().filter_map(|key| Some((key, self.claims.endpoints.get(key)?)));
        let outside = claims.flat_map(|(key, Claim { spec, .. })| {
            let says = |address: &IpAddr| self.claims.blocks.say(*address, &key.namespace, spec);
            addresses(spec).filter(move |address| says(address) == BlockSays::Nothing)
        });
        let claimed: HashSet<IpAddr> = outside.collect();
        let mut taken = HashMap::new();
        if claimed.is_empty() {
            return taken;
        }
        for (key, address) in self.subjects.addresses_of_endpoints() {
            if claimed.contains(&address) && !self.claims.endpoints.contains_key(&key.to_key()) {
                let is_host = key.kind == Kind::HostEndpoint;
                taken.insert(address, if is_host { "a HostEndpoint has" } else { "another pod has" });
            }
        }
        for node in self.network.nodes().values() {
            let of_node = node.addresses().into_iter().filter(|address| claimed.contains(address));
            taken.extend(of_node.map(|address| (address, "is an address of a Node")));
        }
        taken
    }
}
