//! What is wrong with the addresses of a cluster: leaks, duplicates, orphans. Pure: a snapshot in, findings out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use tortie_api::Key;
use tortie_api::ipam::{Attribute, Block, is_virtual};
use tortie_store::Stored;

use crate::claim::overlaps;
use crate::records::{Affinity, AffinityState, Handle};
use crate::release::{Release, node_of};
use crate::services::{LOAD_BALANCER, SERVICE, service_handle};

/// All objects of the kinds that matter. Every list must be complete.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// IPPools.
    pub pools: Vec<Stored>,
    /// IPAM's blocks. They must be listed first: an address that is given later is not seen then.
    pub blocks: Vec<Stored>,
    /// IPAM's handles.
    pub handles: Vec<Stored>,
    /// Affinities of blocks.
    pub affinities: Vec<Stored>,
    /// WorkloadEndpoints.
    pub endpoints: Vec<Stored>,
    /// Pods, where the datastore has them.
    pub pods: Vec<Stored>,
    /// Nodes.
    pub nodes: Vec<Stored>,
    /// Services, where the datastore has them.
    pub services: Vec<Stored>,
}

/// Something wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What it is.
    pub kind: Problem,
    /// The object or address.
    pub about: String,
    /// The reason.
    pub why: String,
    /// What repairs it, if that is safe.
    pub fix: Option<Fix>,
}

/// The kinds of findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    /// An object cannot be read.
    Damaged,
    /// Two pods or blocks have the same address.
    Duplicate,
    /// A pod has an address that IPAM does not know.
    Orphan,
    /// An address belongs to nobody who exists.
    Leak,
    /// A handle names blocks in which it has no address, counts too many there, or has no record.
    Handle,
    /// An affinity of a node that does not exist, or without its block.
    Affinity,
    /// A block outside all pools, or without its affinity.
    Block,
}

/// A repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fix {
    /// Releases the address, if it still is what the check has seen.
    Release(IpNet, Release),
    /// Removes a block from a handle's record.
    Forget(String, IpNet),
    /// Lowers the number of addresses of a block in a handle's record to those that the handle has.
    Count(String, IpNet),
    /// Takes a block from a node.
    GiveUp(String, IpNet),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Damaged => "damaged",
            Self::Duplicate => "duplicate",
            Self::Orphan => "orphan",
            Self::Leak => "leak",
            Self::Handle => "handle",
            Self::Affinity => "affinity",
            Self::Block => "block",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.kind, self.about, self.why)
    }
}

/// Finds what is wrong. An address counts as leaked when its pod has been missing for `grace` seconds since it was given;
/// addresses whose time is unknown are reported and not repaired.
#[must_use]
pub fn check(snapshot: &Snapshot, now: Timestamp, grace: i64) -> Vec<Finding> {
    let mut check = Check { findings: Vec::new(), now, grace, ..Check::default() };
    check.read(snapshot);
    check.overlapping_blocks();
    check.addresses();
    check.orphans();
    check.handles();
    check.affinities();
    check.findings.sort_by(|one, other| (one.kind, &one.about).cmp(&(other.kind, &other.about)));
    check.findings
}

#[derive(Default)]
struct Check {
    findings: Vec<Finding>,
    now: Timestamp,
    grace: i64,
    pools: Vec<IpNet>,
    blocks: BTreeMap<IpNet, Block>,
    handles: BTreeMap<String, Handle>,
    /// The affinities by node and block.
    affinities: BTreeMap<(String, IpNet), Affinity>,
    /// The endpoints of each address, as `namespace/pod`.
    endpoints: BTreeMap<IpAddr, BTreeSet<String>>,
    /// The addresses of each pod; none yet if they are not known.
    pods: BTreeMap<String, BTreeSet<IpAddr>>,
    nodes: BTreeSet<String>,
    /// The handles of the Services of type LoadBalancer; `None` if the datastore has no Services at all.
    services: Option<BTreeSet<String>>,
    /// Whether an endpoint cannot be read, whose address is thus unknown.
    is_incomplete: bool,
}

impl Check {
    fn find(&mut self, kind: Problem, about: impl fmt::Display, why: impl Into<String>, fix: Option<Fix>) {
        self.findings.push(Finding { kind, about: about.to_string(), why: why.into(), fix });
    }

    fn read(&mut self, snapshot: &Snapshot) {
        self.nodes = snapshot.nodes.iter().map(|stored| stored.key.name.clone()).collect();
        let pools =
            snapshot.pools.iter().filter_map(|stored| stored.value["spec"]["cidr"].as_str()?.parse().ok());
        self.pools = pools.collect();
        let of_type = snapshot.services.iter().filter(|stored| stored.value["spec"]["type"] == LOAD_BALANCER);
        let handles = of_type.map(|stored| {
            let uid = stored.value["metadata"]["uid"].as_str().unwrap_or_default();
            service_handle(&stored.key.namespace, &stored.key.name, uid)
        });
        self.services = (!snapshot.services.is_empty()).then(|| handles.collect());
        for stored in &snapshot.blocks {
            match read_block(stored) {
                Ok(block) if block.deleted => {}
                Ok(block) => drop(self.blocks.insert(block.cidr, block)),
                Err(problem) => self.find(Problem::Damaged, &stored.key, problem, None),
            }
        }
        for stored in &snapshot.handles {
            match Handle::deserialize(&stored.value) {
                Ok(handle) if handle.deleted => {}
                Ok(handle) => drop(self.handles.insert(stored.key.name.clone(), handle)),
                Err(error) => self.find(Problem::Damaged, &stored.key, error.to_string(), None),
            }
        }
        for stored in &snapshot.affinities {
            match read_affinity(stored) {
                Ok((_, affinity)) if affinity.deleted => {}
                Ok((key, affinity)) => drop(self.affinities.insert(key, affinity)),
                Err(problem) => self.find(Problem::Damaged, &stored.key, problem, None),
            }
        }
        for stored in &snapshot.endpoints {
            self.read_endpoint(stored);
        }
        for stored in &snapshot.pods {
            let done = matches!(stored.value["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
            if !done && stored.value["spec"]["hostNetwork"] != true {
                let addresses = stored.value["status"]["podIPs"].as_array().into_iter().flatten();
                let addresses = addresses.filter_map(|one| one["ip"].as_str()?.parse().ok());
                self.pods.insert(name_of(&stored.key), addresses.collect());
            }
        }
    }

    fn read_endpoint(&mut self, stored: &Stored) {
        let pod = match stored.value["spec"]["pod"].as_str() {
            Some(pod) => format!("{}/{pod}", stored.key.namespace),
            None => name_of(&stored.key),
        };
        let networks = match &stored.value["spec"]["ipNetworks"] {
            Value::Array(networks) => networks.clone(),
            Value::Null if stored.value["spec"].is_object() => Vec::new(),
            _ => vec![Value::Null],
        };
        for network in networks {
            let net = network.as_str().and_then(|text| {
                text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
            });
            match net {
                Some(net) => drop(self.endpoints.entry(net.addr()).or_default().insert(pod.clone())),
                None => {
                    self.is_incomplete = true;
                    let why = "its addresses cannot be read, so no address counts as leaked";
                    self.find(Problem::Damaged, &stored.key, why, None);
                }
            }
        }
    }

    fn overlapping_blocks(&mut self) {
        let blocks: Vec<IpNet> = self.blocks.keys().copied().collect();
        for (number, one) in blocks.iter().enumerate() {
            // They are ordered by address, so those that overlap are neighbours.
            let others: Vec<&IpNet> =
                blocks[number + 1..].iter().take_while(|it| one.contains(*it)).collect();
            for other in others.into_iter().filter(|other| overlaps(one, other)) {
                let why =
                    format!("the block {other} has addresses of it; release all addresses of one of them");
                self.find(Problem::Duplicate, format!("block {one}"), why, None);
            }
            if !self.pools.iter().any(|pool| pool.contains(one)) {
                let why = "it is in no IPPool: its addresses have no route; store the pool again, or delete its pods";
                self.find(Problem::Block, format!("block {one}"), why, None);
            }
        }
    }

    fn addresses(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        for block in blocks.values() {
            for (address, attribute) in block.allocated() {
                self.address(block, address, attribute);
            }
            if let Some(owner) = block.owner()
                && !self.affinities.contains_key(&(owner.to_owned(), block.cidr))
            {
                let why = format!("it belongs to {}, which has no affinity to it", owner_in_words(owner));
                let fix = (self.is_gone(owner) && !self.nodes.is_empty()) || block.is_empty();
                let fix = fix.then_some(Fix::GiveUp(owner.to_owned(), block.cidr));
                self.find(Problem::Block, format!("block {}", block.cidr), why, fix);
            }
        }
        self.blocks = blocks;
    }

    fn address(&mut self, block: &Block, address: IpAddr, attribute: &Attribute) {
        let handle = attribute.handle_id.clone();
        let release = Fix::Release(
            block.cidr,
            Release { address, handle: handle.clone(), sequence_number: block.sequence_of(address) },
        );
        if let Some(handle) = &handle
            && !self.handles.get(handle).is_some_and(|it| it.block.contains_key(&block.cidr.to_string()))
        {
            let why = format!(
                "the record of its handle {handle} does not name {}: DEL does not release it",
                block.cidr
            );
            self.find(Problem::Handle, address, why, None);
        }
        let Some((why, is_certain)) = self.leaked(block, address, attribute) else { return };
        let text = match &handle {
            Some(handle) => format!("{why} (handle {handle}, block {})", block.cidr),
            None => format!("{why} (block {})", block.cidr),
        };
        let fix = Some(release).filter(|_| is_certain && !self.is_incomplete);
        self.find(Problem::Leak, address, text, fix);
    }

    /// Why an address belongs to nobody, if so, and whether that is certain. Without metadata it counts as used.
    fn leaked(&self, block: &Block, address: IpAddr, attribute: &Attribute) -> Option<(String, bool)> {
        let owner = attribute.owner.as_ref()?;
        if let (Some(namespace), Some(service)) = (owner.get("namespace"), owner.get(SERVICE)) {
            let exists = attribute
                .handle_id
                .as_ref()
                .is_none_or(|it| self.services.as_ref().is_none_or(|all| all.contains(it)));
            let given = owner.get("timestamp").and_then(|time| given_at(time));
            let is_young = given.is_some_and(|at| self.now.as_second() - at.as_second() < self.grace);
            let why = format!(
                "Service {namespace}/{service}, for which it was given, does not exist or is not of type LoadBalancer"
            );
            return (!exists && !is_young).then_some((why, given.is_some()));
        }
        let node = node_of(block, attribute);
        let is_tunnel = owner.get("type").is_some_and(|kind| kind.ends_with("TunnelAddress"));
        let (Some(namespace), Some(pod)) = (owner.get("namespace"), owner.get("pod")) else {
            let gone = node.filter(|node| is_tunnel && !self.nodes.contains(*node))?;
            return Some((
                format!("it is the tunnel address of node {gone}, which does not exist"),
                !self.nodes.is_empty(),
            ));
        };
        let pod = format!("{namespace}/{pod}");
        if self.endpoints.contains_key(&address) {
            return None;
        }
        let may_be_its = |known: &BTreeSet<IpAddr>| known.is_empty() || known.contains(&address);
        if self.pods.get(&pod).is_some_and(may_be_its) {
            return None;
        }
        let gone = node.filter(|node| !self.nodes.contains(*node));
        if let Some(node) = gone {
            let is_certain = !self.nodes.is_empty();
            return Some((format!("pod {pod} was on node {node}, which does not exist"), is_certain));
        }
        match owner.get("timestamp").and_then(|time| given_at(time)) {
            None => Some((format!("pod {pod} does not exist; since when is unknown"), false)),
            Some(at) if self.now.as_second() - at.as_second() < self.grace => None,
            Some(at) => Some((format!("pod {pod}, for which it was given at {at}, does not exist"), true)),
        }
    }

    fn orphans(&mut self) {
        let mut found = Vec::new();
        for (address, pods) in &self.endpoints {
            let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
            if pods.len() > 1 {
                let why = format!("pods {} have it; delete all but one", pods.join(" and "));
                found.push((Problem::Duplicate, *address, why));
            }
            if !self.pools.iter().any(|pool| pool.contains(address)) {
                continue;
            }
            let block = self.blocks.values().find(|block| block.cidr.contains(address));
            let attribute = block.and_then(|block| block.allocated().find(|(one, _)| one == address));
            match attribute {
                None => {
                    let why = format!(
                        "pod {} has it, and IPAM may give it to another one; delete the pod",
                        pods.join(" and ")
                    );
                    found.push((Problem::Orphan, *address, why));
                }
                Some((_, attribute)) => {
                    let text = |name: &str| attribute.owner.as_ref().and_then(|owner| owner.get(name));
                    let Some(owner) = text("namespace").zip(text("pod")) else { continue };
                    let owner = format!("{}/{}", owner.0, owner.1);
                    if !pods.contains(&owner.as_str()) {
                        let why = format!(
                            "pod {} has it, and IPAM gave it to {owner}; delete the pod",
                            pods.join(" and ")
                        );
                        found.push((Problem::Duplicate, *address, why));
                    }
                }
            }
        }
        for (kind, address, why) in found {
            self.find(kind, address, why, None);
        }
    }

    fn handles(&mut self) {
        let mut found = Vec::new();
        for (name, handle) in &self.handles {
            for (cidr, count) in &handle.block {
                let Ok(net) = cidr.parse::<IpNet>() else {
                    found.push((name.clone(), format!("it names {cidr:?}, which is no network"), None));
                    continue;
                };
                let has = self.blocks.get(&net).map_or(0, |block| block.addresses_of(name).count());
                let (why, fix) = match has {
                    0 => (
                        format!("it has no address of {net}, which its record names"),
                        Fix::Forget(name.clone(), net),
                    ),
                    _ if u64::try_from(has).is_ok_and(|has| has < *count) => (
                        format!("it has {has} addresses of {net}, and its record counts {count}"),
                        Fix::Count(name.clone(), net),
                    ),
                    _ => continue,
                };
                found.push((name.clone(), why, Some(fix)));
            }
        }
        // A block that cannot be read may have such an address.
        let is_damaged = self.findings.iter().any(|finding| finding.kind == Problem::Damaged);
        for (name, why, fix) in found {
            self.find(Problem::Handle, format!("handle {name}"), why, fix.filter(|_| !is_damaged));
        }
    }

    fn affinities(&mut self) {
        let mut found = Vec::new();
        for ((owner, cidr), affinity) in &self.affinities {
            let block = self.blocks.get(cidr);
            let why = match block {
                _ if self.is_gone(owner) => "its node does not exist".to_owned(),
                None if affinity.state == AffinityState::Confirmed => "its block does not exist".to_owned(),
                Some(block) if !block.belongs_to(owner) => match block.owner() {
                    Some(owner) => format!("its block belongs to {}", owner_in_words(owner)),
                    None => "its block has no owner".to_owned(),
                },
                _ => continue,
            };
            found.push((owner.clone(), *cidr, why));
        }
        let is_damaged = self.findings.iter().any(|finding| finding.kind == Problem::Damaged);
        for (owner, cidr, why) in found {
            // Without any node, the datastore may have lost them.
            let fix = (!is_damaged && !self.nodes.is_empty()).then(|| Fix::GiveUp(owner.clone(), cidr));
            self.find(Problem::Affinity, format!("affinity {owner}/{cidr}"), why, fix);
        }
    }

    /// Whether an owner of blocks is a node that does not exist.
    fn is_gone(&self, owner: &str) -> bool {
        !is_virtual(owner) && !self.nodes.contains(owner)
    }
}

fn owner_in_words(owner: &str) -> String {
    if is_virtual(owner) { owner.to_owned() } else { format!("node {owner}") }
}

fn read_block(stored: &Stored) -> Result<Block, String> {
    let block = Block::deserialize(&stored.value).map_err(|error| error.to_string())?;
    block.check().map_err(|error| error.problem)?;
    if block.cidr.to_string() != stored.key.name {
        return Err(format!("it contains the addresses of {}", block.cidr));
    }
    Ok(block)
}

fn read_affinity(stored: &Stored) -> Result<((String, IpNet), Affinity), String> {
    let (node, cidr) = stored.key.name.split_once('/').ok_or("its name is not NODE/CIDR")?;
    let cidr = cidr.parse().map_err(|_| format!("{cidr:?} is no network"))?;
    let affinity = Affinity::deserialize(&stored.value).map_err(|error| error.to_string())?;
    Ok(((node.to_owned(), cidr), affinity))
}

fn name_of(key: &Key) -> String {
    format!("{}/{}", key.namespace, key.name)
}

/// The time at which an address was given, in Go's text form: `2026-01-02 15:04:05.123456 +0000 UTC`.
fn given_at(text: &str) -> Option<Timestamp> {
    let mut parts = text.split(' ');
    let (date, time, zone) = (parts.next()?, parts.next()?, parts.next()?);
    format!("{date}T{time}{zone}").parse().ok()
}
