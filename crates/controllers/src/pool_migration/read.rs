//! Reads what a migration looks at from the objects of a cluster.

use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::ipam::{Attribute, Block};
use tortie_api::kubernetes::Node;
use tortie_api::{Key, Kind, support};
use tortie_ipam::Release;
use tortie_store::Stored;

use super::observed::{
    Given, LeftAddress, MigratingCluster, MigratingNode, MigratingPod, MigrationRequest, NodeRecord, Objects,
    OldPool, PoolRecord, ReadPool, WaitingPod, given, has_address, has_ended, is_in, is_kept, other_pool,
    pod_of, read_pool, record, uid,
};
use super::{checks, taints};
use crate::load_balancers::shown;

/// Reads what matters, and checks it.
pub(super) fn read(objects: &Objects, request: &MigrationRequest, now: Timestamp) -> MigratingCluster {
    let MigrationRequest { old, new, planned, pods: _ } = request;
    let mut cluster = MigratingCluster {
        pools: (old.clone(), new.clone()),
        has_new: objects.pool(new).is_some(),
        ..MigratingCluster::default()
    };
    for stored in &objects.nodes {
        let record = record::<NodeRecord>(&stored.value, &stored.key.to_string());
        let record = record.unwrap_or_else(|problem| {
            cluster.refusals.push(problem);
            None
        });
        if let Some(other) = record.as_ref().filter(|record| record.pool != *old) {
            cluster.refusals.push(other_pool(&stored.key.name, &other.pool));
        }
        let node = MigratingNode {
            is_schedulable: stored.value["spec"]["unschedulable"] != true,
            is_ready: taints::is_ready(&stored.value),
            is_windows: support::is_windows(&stored.value),
            taints: taints::taints(&stored.value),
            record: record.filter(|record| record.pool == *old),
            ..MigratingNode::default()
        };
        cluster.nodes.insert(stored.key.name.clone(), node);
    }
    let old = match objects.pool(old) {
        None => None,
        Some(Ok(pool)) => Some(pool),
        Some(Err(problem)) => {
            cluster.refusals.push(problem);
            return cluster;
        }
    };
    let Some(old) = old else {
        // The last step deletes it.
        if cluster.nodes.values().all(|node| node.record.is_none()) {
            cluster.refusals.push(format!(
                "IPPool {} does not exist; if an earlier run has ended with its deletion, nothing is left to do",
                request.old
            ));
        }
        return cluster;
    };
    let pool_record = record::<PoolRecord>(&old.value, &format!("IPPool {}", old.name));
    let pool_record = pool_record.unwrap_or_else(|problem| {
        cluster.refusals.push(problem);
        None
    });
    // Without a record on the pool, nothing has begun, so records of nodes are left from before.
    for node in cluster.nodes.values_mut() {
        let is_current = |record: &NodeRecord| pool_record.is_some() && record.is_of(pool_record.as_ref());
        node.has_old_record = node.record.as_ref().is_some_and(|record| !is_current(record));
        node.record = node.record.take().filter(is_current);
    }
    let waited = pool_record.as_ref().map(|record| &record.without_address);
    for pod in objects.pods.iter().filter(|pod| lacks_address(pod)) {
        let uid = uid(pod);
        if !waited.is_some_and(|waited| waited.contains(&uid)) {
            let obstacle = checks::pin_of_pod(objects, pod, &old);
            cluster.without_address.insert(pod.key.clone(), WaitingPod { uid, obstacle });
        }
    }
    cluster.old = Some(OldPool { is_disabled: old.pool.spec.disabled, record: pool_record });
    let new = objects.pool(new).or_else(|| Some(read_pool(new, planned.as_ref()?)));
    let (blocks, damaged) = objects.readable_blocks(now);
    let given = given(&blocks);
    read_pods(objects, request, &old, &given, &mut cluster);
    read_blocks(objects, old.pool.spec.cidr, &blocks, &mut cluster);
    read_announced(objects, old.pool.spec.cidr, &mut cluster);
    for stored in &objects.services {
        let Stored { key, value, .. } = stored;
        let in_old = shown(value).into_iter().filter(|address| old.pool.spec.cidr.contains(address));
        for address in in_old {
            cluster.services.entry(key.clone()).or_default().shown.push(address);
        }
        if let Some(service) = cluster.services.get_mut(key) {
            service.obstacle = checks::pin_of(stored, &old);
        }
    }
    let found = checks::refusals(objects, request, (&old, new), (&blocks, &damaged, &given), &cluster);
    cluster.refusals.extend(found);
    cluster
}

fn read_pods(
    objects: &Objects,
    request: &MigrationRequest,
    old: &ReadPool,
    given: &Given,
    cluster: &mut MigratingCluster,
) {
    for pod in objects.pods.iter().filter(|pod| is_in(pod, old.pool.spec.cidr, given)) {
        let Stored { key, value, .. } = pod;
        let node = value["spec"]["nodeName"].as_str().and_then(|name| cluster.nodes.get_mut(name));
        // The controllers remove what is left of a node that is gone.
        let Some(node) = node else { continue };
        node.pods.push(MigratingPod {
            key: key.clone(),
            uid: uid(pod),
            is_ending: !value["metadata"]["deletionTimestamp"].is_null(),
            tolerations: taints::tolerations(value),
            obstacle: checks::obstacle(objects, request, pod, old),
        });
    }
}

/// Whether a pod has come to a node, and has no address yet.
fn lacks_address(pod: &Stored) -> bool {
    let Stored { value, .. } = pod;
    value["spec"]["nodeName"].is_string()
        && value["spec"]["hostNetwork"] != true
        && is_kept(pod)
        && !has_address(value)
}

fn read_announced(objects: &Objects, net: IpNet, cluster: &mut MigratingCluster) {
    for stored in &objects.nodes {
        let annotations = &stored.value["metadata"]["annotations"];
        for name in [Node::VXLAN_ADDRESS, Node::VXLAN_ADDRESS_V6, Node::IPIP_ADDRESS] {
            let address = annotations[name].as_str().and_then(|text| text.parse::<IpAddr>().ok());
            if let Some(address) = address.filter(|address| net.contains(address))
                && let Some(node) = cluster.nodes.get_mut(&stored.key.name)
            {
                node.tunnels.entry(address).or_default().is_announced = true;
            }
        }
    }
}

fn read_blocks(objects: &Objects, net: IpNet, blocks: &[Block], cluster: &mut MigratingCluster) {
    for stored in &objects.affinities {
        if let Some((owner, block)) = stored.key.name.split_once('/')
            && let Ok(block) = block.parse::<IpNet>()
            && net.contains(&block)
        {
            cluster.blocks.entry(block).or_default().owners.insert(owner.to_owned());
        }
    }
    for block in blocks.iter().filter(|block| net.contains(&block.cidr)) {
        let old = cluster.blocks.entry(block.cidr).or_default();
        old.owners.extend(block.owner().map(str::to_owned));
        old.used = block.allocations.iter().flatten().count();
        let rests = |index: &&usize| block.attributes.get(**index).is_some_and(|it| it.released_at.is_some());
        let resting = block.allocations.iter().flatten().filter(rests).count();
        if resting > 0 {
            let why = format!(
                "{resting} addresses of block {} rest after their release (ipCooldownSeconds of IPAMConfig)",
                block.cidr
            );
            cluster.left.push(LeftAddress { address: block.cidr.addr(), pod: None, why });
        }
        for (address, attribute) in block.allocated() {
            read_address(objects, block, address, attribute, cluster);
        }
    }
}

fn read_address(
    objects: &Objects,
    block: &Block,
    address: IpAddr,
    attribute: &Attribute,
    cluster: &mut MigratingCluster,
) {
    let owner = |name: &str| attribute.owner.as_ref().and_then(|owner| owner.get(name)).map(String::as_str);
    let handle = attribute.handle_id.clone();
    let release = Release { address, handle: handle.clone(), sequence_number: block.sequence_of(address) };
    if let (Some(namespace), Some(service)) = (owner("namespace"), owner("service")) {
        let key = Key::namespaced(Kind::Service, namespace, service);
        if objects.services.iter().any(|stored| stored.key == key) {
            cluster.services.entry(key).or_default().allocated.push((block.cidr, release));
        } else {
            let why =
                format!("{address} belongs to {key}, which does not exist; `tortie controllers` release it");
            cluster.left.push(LeftAddress { address, pod: None, why });
        }
        return;
    }
    if let (Some(node), Some(kind)) = (owner("node"), owner("type"))
        && ["vxlanTunnelAddress", "vxlanV6TunnelAddress", "ipipTunnelAddress"].contains(&kind)
        && let Some(node) = cluster.nodes.get_mut(node)
    {
        node.tunnels.entry(address).or_default().allocated = Some((block.cidr, release));
        return;
    }
    let pod = pod_of(attribute);
    let why = whose(objects, address, pod.as_ref(), owner("node"), handle.as_deref());
    cluster.left.push(LeftAddress { address, pod, why });
}

/// Whose address it is, and what releases it.
fn whose(
    objects: &Objects,
    address: IpAddr,
    pod: Option<&Key>,
    node: Option<&str>,
    handle: Option<&str>,
) -> String {
    let handle = handle.unwrap_or("none");
    if let Some(node) = node.filter(|node| objects.nodes.iter().all(|stored| stored.key.name != **node)) {
        return format!(
            "{address} was given to node {node}, which does not exist; `tortie controllers` release it, or \
             `tortie ipam release --node {node}`"
        );
    }
    let Some(pod) = pod else {
        let whose = node.map_or_else(|| "nobody".to_owned(), |node| format!("node {node}"));
        return format!(
            "{address} belongs to {whose} (handle {handle}); `tortie ipam release --ip {address}` releases it"
        );
    };
    match objects.pods.iter().find(|stored| stored.key == *pod) {
        Some(stored) if has_ended(&stored.value) => {
            format!("{address} belongs to {pod}, which has ended; delete the pod")
        }
        Some(_) => format!("the node of {pod} releases {address}"),
        None => format!(
            "the node of {pod}, which is gone, releases {address}; if it does not, `tortie ipam check --fix` does"
        ),
    }
}
