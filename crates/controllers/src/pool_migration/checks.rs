//! What speaks against a migration: pools that do not fit, and pods that it could not move.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::calico::{EncapsulationMode, IpPool};
use tortie_api::ipam::Block;
use tortie_api::support::{self, WindowsNode};
use tortie_store::Stored;

use super::observed::{
    self, Given, MigratingCluster, MigrationRequest, Objects, OldPool, PoolRecord, ReadPool, is_in, is_kept,
    labels,
};
use super::room;
use crate::pools::MIGRATION;

/// The annotation of a static pod's image in the API.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// The annotations of Pods and Namespaces, and those of Services, that name pools.
const POOLS: [&str; 4] = [
    "cni.projectcalico.org/ipv4pools",
    "cni.projectcalico.org/ipv6pools",
    "projectcalico.org/ipv4pools",
    "projectcalico.org/ipv6pools",
];
/// The annotations of Pods, and that of Services, that name addresses.
const ADDRESSES: [&str; 2] = ["cni.projectcalico.org/ipAddrs", "projectcalico.org/loadBalancerIPs"];

/// Everything that speaks against it. `new` is `None` if it does not exist, and none is planned.
pub(super) fn refusals(
    objects: &Objects,
    request: &MigrationRequest,
    (old, new): (&ReadPool, Option<Result<ReadPool, String>>),
    (blocks, damaged, given): (&[Block], &[String], &Given),
    cluster: &MigratingCluster,
) -> Vec<String> {
    let mut found = Vec::new();
    for block in damaged {
        found.push(format!(
            "IPAMBlock {block} cannot be read, so its addresses are unknown; see `tortie ipam check`"
        ));
    }
    match new {
        None => found
            .push(format!("IPPool {} does not exist; create it, or give its network (--cidr)", request.new)),
        Some(Err(problem)) => found.push(problem),
        Some(Ok(new)) => {
            found.extend(pair(old, &new));
            let has_begun = cluster.old.as_ref().is_some_and(|old| old.record.is_some());
            found.extend(other_objects(objects, &new, has_begun));
            let windows_nodes = judged(objects, cluster);
            found.extend(selectors(objects, old, &new, &windows_nodes));
            found.extend(stuck_on_windows(objects, old, blocks, given));
            found.extend(unfit_for_windows(&new, &windows_nodes));
            found.extend(room::room(objects, old, &new, blocks, cluster));
            found.extend(record(cluster, &old.name, &new.name));
            found.extend(other_migrations(objects, old, &new));
        }
    }
    found.extend(overlaps(objects, old, &request.new));
    // When it has begun, whoever may create pods must not end it. It waits for those that are in the way.
    if cluster.old.as_ref().is_none_or(|old| old.record.is_none()) {
        found.extend(pinned(objects, old));
        found.extend(pods(objects, request, old, given));
    }
    found
}

/// What two pools must have in common.
fn pair(old: &ReadPool, new: &ReadPool) -> Vec<String> {
    let mut found = Vec::new();
    if support::is_terminating(&new.value) {
        found.push(format!(
            "IPPool {} was deleted, and stays only until its addresses are released; name another pool",
            new.name
        ));
    }
    let (ReadPool { name: from, pool: old, .. }, ReadPool { name: to, pool: new, .. }) = (old, new);
    if from == to {
        found.push(format!("IPPool {from} cannot move to itself; name another pool"));
        return found;
    }
    if old.spec.cidr.addr().is_ipv4() != new.spec.cidr.addr().is_ipv4() {
        found.push(format!(
            "IPPool {to}: spec.cidr: it has addresses of the other family; name a pool of that of {from}"
        ));
    }
    if new.spec.disabled {
        found.push(format!("IPPool {to}: spec.disabled: it gives no addresses; set it to false"));
    }
    if new.spec.assignment_mode.as_deref().is_some_and(|mode| mode != "Automatic") {
        found.push(format!(
            "IPPool {to}: spec.assignmentMode: only pods that name the pool get addresses; set it to Automatic"
        ));
    }
    let lacks = old.spec.allowed_uses.iter().find(|each| !new.spec.allowed_uses.contains(each));
    if let Some(lacks) = lacks {
        found.push(format!("IPPool {to}: spec.allowedUses: {lacks}, which {from} has, is missing; add it"));
    }
    let is_encapsulated = |pool: &IpPool| pool.encapsulation() != EncapsulationMode::Never;
    if is_encapsulated(old) && !is_encapsulated(new) && !new.is_for_load_balancers() {
        found.push(format!(
            "IPPool {to}: spec.vxlanMode: {from} encapsulates packets between nodes and {to} does not, so its packets may reach no other \
             node; set it to Always, and change it after the migration"
        ));
    }
    if old.spec.nat_outgoing && !new.spec.nat_outgoing && !new.is_for_load_balancers() {
        found.push(format!(
            "IPPool {to}: spec.natOutgoing: {from} hides its pods behind their nodes and {to} does not, so what they send may find no way \
             back to the cluster; set it to true, and change it after the migration"
        ));
    }
    if !old.spec.disable_bgp_export && new.spec.disable_bgp_export {
        found.push(format!(
            "IPPool {to}: spec.disableBGPExport: BGP peers know the routes of {from}, and would get none of {to}; set it to false, and \
             change it after the migration"
        ));
    }
    found
}

/// Pods and blocks of a pool inside or around the old one would look as if they were of the old one, and never all leave it. The
/// new pool is compared elsewhere.
fn overlaps(objects: &Objects, old: &ReadPool, new: &str) -> Vec<String> {
    let cidr = old.pool.spec.cidr;
    let others = objects.pools.iter().filter(|it| it.key.name != old.name && it.key.name != new);
    let others = others.filter_map(|stored| support::Pool::of(&stored.key, &stored.value));
    others
        .filter(|other| other.cidr.contains(&cidr) || cidr.contains(&other.cidr))
        .map(|other| {
            format!(
                "IPPool {}: spec.cidr: {cidr} and {} of IPPool {} overlap, so their addresses cannot be told apart; end what has \
                 divided the pool (`tortie ipam split`), or delete one of them, before",
                old.name, other.cidr, other.name
            )
        })
        .collect()
}

/// Conflicts of the new pool with other pools, nodes and Services.
fn other_objects(objects: &Objects, new: &ReadPool, has_begun: bool) -> Vec<String> {
    let mut found = Vec::new();
    let name = &new.name;
    let key = tortie_api::Key::global(tortie_api::Kind::IpPool, name.as_str());
    let Some(pool) = support::Pool::of(&key, &new.value) else { return found };
    let pools: Vec<support::Pool> =
        objects.pools.iter().filter_map(|stored| support::Pool::of(&stored.key, &stored.value)).collect();
    let nodes = objects.nodes.iter().flat_map(|node| {
        // Earlier versions began migrations to pools in the nodes' IPv6 networks, and nothing is gained by stopping in the middle.
        let networks = support::node_networks(&node.value).into_iter();
        networks
            .filter(move |net| !has_begun || net.addr().is_ipv4())
            .map(|network| (&*node.key.name, network))
    });
    let conflict = support::conflicts(&pool, &pools).or_else(|| support::overlapping_nodes(&pool, nodes));
    found.extend(conflict.map(|problem| format!("IPPool {name}: spec.cidr: {problem}; choose another cidr")));
    for error in support::rejected(key.kind, &new.value) {
        found.push(format!("IPPool {name}: {}: {}", error.path, error.problem));
    }
    let of_services = objects.services.iter().flat_map(|service| {
        let spec = &service.value["spec"];
        let ips = spec["clusterIPs"].as_array().into_iter().flatten().chain([&spec["clusterIP"]]);
        ips.filter_map(|ip| Some((service.key.to_string(), ip.as_str()?.parse::<IpAddr>().ok()?)))
    });
    if let Some((service, address)) = of_services.into_iter().find(|(_, address)| pool.cidr.contains(address))
    {
        found.push(format!(
            "IPPool {name}: spec.cidr: {} contains the cluster IP {address} of {service}; choose a network outside of that of Services",
            pool.cidr
        ));
    }
    for stored in &objects.bgp {
        let listed = stored.value["spec"]["serviceClusterIPs"].as_array().into_iter().flatten();
        let nets = listed.filter_map(|each| each["cidr"].as_str()?.parse::<IpNet>().ok());
        for net in nets.filter(|net| net.contains(&pool.cidr) || pool.cidr.contains(net)) {
            found.push(format!(
                "IPPool {name}: spec.cidr: {} overlaps {net}, the network of Services in {}; choose another one",
                pool.cidr, stored.key
            ));
        }
    }
    found
}

/// Whoever may use the old pool must be allowed to use the new one.
fn selectors(
    objects: &Objects,
    old: &ReadPool,
    new: &ReadPool,
    windows_nodes: &[WindowsNode],
) -> Vec<String> {
    let for_node = |pool: &IpPool, labels: &BTreeMap<String, String>| {
        pool.spec.node_selector.as_ref().is_none_or(|selector| selector.matches(labels))
    };
    let for_namespace = |pool: &IpPool, labels: &BTreeMap<String, String>| {
        pool.spec.namespace_selector.as_ref().is_none_or(|selector| selector.matches(labels))
    };
    let lost = |all: &[Stored], is_for: &dyn Fn(&IpPool, &BTreeMap<String, String>) -> bool| -> Vec<String> {
        let labelled = all.iter().map(|object| (object, labels(object)));
        let lost = labelled.filter(|(_, labels)| is_for(&old.pool, labels) && !is_for(&new.pool, labels));
        lost.map(|(object, _)| object.key.name.clone()).collect()
    };
    let (mut nodes, namespaces) =
        (lost(&objects.nodes, &for_node), lost(&objects.namespaces, &for_namespace));
    // A Windows node that gets no addresses of the old pool loses none.
    let of_windows: BTreeSet<&str> = all_windows(objects).map(|node| node.key.name.as_str()).collect();
    let uses_old =
        |name: &String| windows_nodes.iter().any(|node| node.name == *name && node.may_use(&old.pool));
    nodes.retain(|name| !of_windows.contains(name.as_str()) || uses_old(name));
    let mut found = Vec::new();
    for (field, kind, lost) in
        [("nodeSelector", "Nodes", nodes), ("namespaceSelector", "Namespaces", namespaces)]
    {
        if !lost.is_empty() {
            found.push(format!(
                "IPPool {}: spec.{field}: it does not select {kind} that {} selects: {}; change the selector",
                new.name,
                old.name,
                lost.join(", ")
            ));
        }
    }
    found
}

fn all_windows(objects: &Objects) -> impl Iterator<Item = &Stored> {
    objects.nodes.iter().filter(|node| support::is_windows(&node.value))
}

/// The Windows nodes that count. When the migration has begun, one that comes counts from when it has announced its network: a
/// kubelet that registers must not end the migration, and no agent uses a pool before.
fn judged(objects: &Objects, cluster: &MigratingCluster) -> Vec<WindowsNode> {
    let has_begun = cluster.old.as_ref().is_some_and(|old| old.record.is_some());
    let nodes = all_windows(objects).filter_map(|node| WindowsNode::of(&node.key, &node.value));
    nodes.filter(|node| !has_begun || node.network.is_some()).collect()
}

/// A Windows node keeps its block, from which HNS made its network.
fn stuck_on_windows(objects: &Objects, old: &ReadPool, blocks: &[Block], given: &Given) -> Option<String> {
    let names: BTreeSet<&str> = all_windows(objects).map(|node| node.key.name.as_str()).collect();
    let cidr = old.pool.spec.cidr;
    let mut stuck = BTreeSet::new();
    for block in blocks.iter().filter(|block| cidr.contains(&block.cidr)) {
        stuck.extend(block.node());
        stuck.extend(
            block.allocated().filter_map(|(_, it)| it.owner.as_ref()?.get("node")).map(String::as_str),
        );
    }
    let affinities = objects.affinities.iter().filter_map(|stored| stored.key.name.split_once('/'));
    stuck.extend(
        affinities.filter(|(_, net)| net.parse().is_ok_and(|net: IpNet| cidr.contains(&net))).map(|it| it.0),
    );
    let running = objects.pods.iter().filter(|pod| is_in(pod, cidr, given));
    stuck.extend(running.filter_map(|pod| pod.value["spec"]["nodeName"].as_str()));
    stuck.retain(|node| names.contains(node));
    let stuck: Vec<&str> = stuck.into_iter().collect();
    (!stuck.is_empty()).then(|| {
        format!(
            "Windows nodes have blocks of IPPool {}, from which their HNS networks are made: {}. Set disabled: true on the pool. Then, \
             one node after the other: drain it, stop its agent and kubelet, delete its Node, `tortie ipam release --node NODE`, start \
             them again, and let `tortie windows reconfigure` on it replace the network (of IPv6: restart the machine). Then start this \
             command again",
            old.name,
            stuck.join(", ")
        )
    })
}

/// The new pool must be one that Windows nodes can use.
fn unfit_for_windows(new: &ReadPool, nodes: &[WindowsNode]) -> Vec<String> {
    let name = &new.name;
    let mut found = Vec::new();
    if let Some(node) = nodes.first().filter(|_| new.pool.has_ipip()) {
        found.push(format!(
            "IPPool {name}: spec.ipipMode: the Windows node {} has no IPIP, and could not reach the pool's pods; use vxlanMode: Always",
            node.name
        ));
    }
    let unfit = support::unfit_for_windows(&new.pool, nodes).into_iter();
    found.extend(unfit.map(|error| format!("IPPool {name}: {}: {}", error.path, error.problem)));
    found
}

/// Whether the old pool moves to another pool already, or somebody has enabled it.
fn record(cluster: &MigratingCluster, old: &str, new: &str) -> Option<String> {
    let OldPool { is_disabled, record } = cluster.old.as_ref()?;
    let PoolRecord { to, .. } = record.as_ref()?;
    if to != new {
        return Some(format!(
            "IPPool {old} moves to {to} already; continue with `tortie pool migrate {old} {to}`, or remove its annotation {MIGRATION}"
        ));
    }
    (!is_disabled).then(|| {
        format!(
            "IPPool {old}: spec.disabled: the pool was enabled after its migration to {new} had begun; set it to true to go on, or remove \
             the annotation {MIGRATION} to begin anew"
        )
    })
}

/// Whether a migration of another pool needs one of the two as it is.
fn other_migrations(objects: &Objects, old: &ReadPool, new: &ReadPool) -> Vec<String> {
    let mut found = Vec::new();
    for Stored { key, value, .. } in &objects.pools {
        let name = &key.name;
        match observed::record::<PoolRecord>(value, &format!("IPPool {name}")) {
            Ok(Some(PoolRecord { to, .. })) if *name == new.name => found.push(format!(
                "IPPool {name} moves to {to} itself; name {to}, or end that (`tortie pool migrate {name} {to}`) before, or remove its annotation {MIGRATION}"
            )),
            Ok(Some(PoolRecord { to, .. })) if to == old.name => found.push(format!(
                "IPPool {name} moves to {to}, which would be closed meanwhile; end that (`tortie pool migrate {name} {to}`) before, or remove its annotation {MIGRATION}"
            )),
            // The records of the old pool and of others are somebody else's.
            Ok(_) => {}
            Err(problem) if *name == new.name => found.push(problem),
            Err(_) => {}
        }
    }
    found
}

/// The object and its annotation that asks for the old pool by name, network or address: it would get none any more.
fn pin(object: &Stored, old: &ReadPool) -> Option<String> {
    let cidr = old.pool.spec.cidr;
    let annotations = object.value["metadata"]["annotations"].as_object()?;
    let list = |name: &str| serde_json::from_str::<Vec<String>>(annotations.get(name)?.as_str()?).ok();
    let of_pool = |text: &String| *text == old.name || text.parse() == Ok(cidr);
    let of_address = |text: &String| text.parse::<IpAddr>().is_ok_and(|address| cidr.contains(&address));
    let pool = POOLS.into_iter().find(|name| list(name).is_some_and(|all| all.iter().any(of_pool)));
    let name = pool.or_else(|| {
        ADDRESSES.into_iter().find(|name| list(name).is_some_and(|all| all.iter().any(of_address)))
    })?;
    Some(format!("{} ({name})", object.key))
}

fn asks(old: &ReadPool, pins: &str) -> String {
    format!(
        "annotations ask for addresses of IPPool {}: {pins}; change them to the new pool where they are written (for pods of a \
         Deployment, in its template)",
        old.name
    )
}

/// Why an object that asks for addresses of the old pool would get none, with the remedy.
pub(super) fn pin_of(object: &Stored, old: &ReadPool) -> Option<String> {
    Some(asks(old, &pin(object, old)?))
}

/// The same for a pod: it, or its namespace, may ask.
pub(super) fn pin_of_pod(objects: &Objects, pod: &Stored, old: &ReadPool) -> Option<String> {
    let namespace = || objects.namespaces.iter().find(|namespace| namespace.key.name == pod.key.namespace);
    pin_of(pod, old).or_else(|| pin_of(namespace()?, old))
}

/// Everything that asks for the old pool.
fn pinned(objects: &Objects, old: &ReadPool) -> Option<String> {
    let pods = objects.pods.iter().filter(|pod| is_kept(pod));
    let all = pods.chain(&objects.namespaces).chain(&objects.services);
    let found: Vec<String> = all.filter_map(|object| pin(object, old)).collect();
    (!found.is_empty()).then(|| asks(old, &found.join(", ")))
}

/// What speaks against the eviction of a pod, each with the remedy: nobody starts it again, or it loses data.
fn losses(pod: &Stored, request: &MigrationRequest) -> Vec<(&'static str, &'static str)> {
    if !pod.value["metadata"]["annotations"][MIRROR].is_null() {
        let what = "static pods have addresses of the pool, and an eviction does not end them";
        return vec![(what, "remove their manifests from the nodes")];
    }
    let mut owners = pod.value["metadata"]["ownerReferences"].as_array().into_iter().flatten();
    let mut volumes = pod.value["spec"]["volumes"].as_array().into_iter().flatten();
    let mut found = Vec::new();
    if !request.pods.unmanaged && !owners.any(|owner| owner["controller"] == true) {
        found.push(("no controller starts these pods again", "delete them, or use --delete-unmanaged"));
    }
    if !request.pods.with_empty_dir && volumes.any(|volume: &Value| !volume["emptyDir"].is_null()) {
        let what = "these pods lose the data of their volumes of type emptyDir";
        found.push((what, "use --delete-emptydir-data if it is not needed"));
    }
    found
}

fn name(pod: &Stored) -> String {
    format!("{}/{}", pod.key.namespace, pod.key.name)
}

/// The pods with addresses of the old pool that must not be evicted.
fn pods(objects: &Objects, request: &MigrationRequest, old: &ReadPool, given: &Given) -> Vec<String> {
    let mut found: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for pod in objects.pods.iter().filter(|pod| is_kept(pod) && is_in(pod, old.pool.spec.cidr, given)) {
        losses(pod, request).into_iter().for_each(|loss| found.entry(loss).or_default().push(name(pod)));
    }
    found.into_iter().map(|((what, remedy), pods)| format!("{what}: {}; {remedy}", pods.join(", "))).collect()
}

/// Why a pod with an address of the old pool must not be evicted, with the remedy.
pub(super) fn obstacle(
    objects: &Objects,
    request: &MigrationRequest,
    pod: &Stored,
    old: &ReadPool,
) -> Option<String> {
    let loss = || losses(pod, request).into_iter().next();
    let loss = || loss().map(|(what, remedy)| format!("{what}: {}; {remedy}", name(pod)));
    pin_of_pod(objects, pod, old).or_else(loss)
}
