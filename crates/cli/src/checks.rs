//! What `tortie apply` and `tortie delete` reject, or warn about, beyond problems of a single object: fields that
//! Tortie does not support, and pools that conflict with others or are in use.

use std::collections::BTreeSet;

use anyhow::bail;
use ipnet::IpNet;
use serde::Deserialize as _;
use serde_json::Value;
use tortie_api::calico::IpPool;
use tortie_api::ipam::Block;
use tortie_api::manifest::{Object, Problem};
use tortie_api::support::{self, Pool, WindowsNode};
use tortie_api::{FieldError, Key, Kind, Resource};
use tortie_controllers::{blocks_outside, networks_of_others};
use tortie_ipam::{InUse, in_use};
use tortie_store::{Store, Stored};

use crate::ipam::windows_node;
use crate::output;
use crate::store::list;

/// How objects are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writing {
    /// They are merged into the stored ones, which keep fields that the manifests leave out.
    Merged,
    /// They replace the stored ones.
    Replaced,
}

impl Writing {
    /// The object as it will be stored.
    fn result(self, object: &Object, before: Option<&Stored>) -> Value {
        let before = before.map(|before| &before.value);
        match self {
            Self::Merged => tortie_store::applied(&object.value, before, object.key.kind),
            Self::Replaced => tortie_store::replaced(&object.value, before, object.key.kind),
        }
    }
}

/// Rejects objects with fields that Tortie does not support. Prints every problem with its position.
pub(crate) fn refuse_fields(objects: &[Object]) -> anyhow::Result<()> {
    let fields = objects.iter().flat_map(|object| {
        support::rejected(object.key.kind, &object.value).into_iter().map(move |error| at(object, error))
    });
    refuse_problems(&fields.collect::<Vec<_>>())
}

/// Rejects what conflicts with stored objects, as a pool that overlaps with another one. Prints every problem with its
/// position.
pub(crate) async fn refuse(store: &dyn Store, objects: &[Object], how: Writing) -> anyhow::Result<()> {
    let mut found = pool_problems(store, objects, how).await?;
    found.extend(settings_beside_windows(store, objects).await?);
    let problems = found.into_iter().map(|(object, error)| at(object, error));
    refuse_problems(&problems.collect::<Vec<_>>())
}

/// The settings of the cluster with which its Windows nodes could not work.
async fn settings_beside_windows<'a>(
    store: &dyn Store,
    objects: &'a [Object],
) -> anyhow::Result<Vec<(&'a Object, FieldError)>> {
    let is_concerned = |object: &&Object| match object.key.kind {
        Kind::IpamConfig => object.value["strict_affinity"] == false,
        // That of one node does not count for the others.
        Kind::FelixConfiguration => {
            object.key.name == "default" && !object.value["spec"]["vxlanVNI"].is_null()
        }
        _ => false,
    };
    let concerned: Vec<&Object> = objects.iter().filter(is_concerned).collect();
    if concerned.is_empty() {
        return Ok(Vec::new());
    }
    let nodes = list(store, Kind::Node).await?;
    let windows = windows_nodes(&nodes);
    let mut found = Vec::new();
    for object in concerned {
        if object.key.kind == Kind::IpamConfig {
            let problem = |node| format!("must be true, because {node} is a Windows node");
            let error =
                windows_node(&nodes).map(|node| FieldError::new("spec.strictAffinity", problem(node)));
            found.extend(error.map(|error| (object, error)));
        } else if let Some(error) = support::low_vni_beside_windows(&object.value, &windows) {
            let before = store.get(&object.key).await?;
            // Where it is so already, other settings may still be changed.
            let was_low =
                before.and_then(|before| support::low_vni_beside_windows(&before.value, &windows)).is_some();
            found.extend((!was_low).then_some((object, error)));
        }
    }
    Ok(found)
}

fn windows_nodes(nodes: &[Stored]) -> Vec<WindowsNode> {
    nodes.iter().filter_map(|node| WindowsNode::of(&node.key, &node.value)).collect()
}

fn refuse_problems(problems: &[Problem]) -> anyhow::Result<()> {
    for problem in problems {
        output::error_line(&problem.to_string());
    }
    match problems.len() {
        0 => Ok(()),
        count => bail!("{}; nothing was changed", output::count(count as u64, "problem")),
    }
}

/// Warns about fields without effect, and about pods whose namespace does not exist.
pub(crate) async fn warn(store: &dyn Store, objects: &[Object]) -> anyhow::Result<()> {
    for object in objects {
        for error in support::reported(object.key.kind, &object.value) {
            output::error_line(&format!("warning: {}", at(object, error)));
        }
        let has_annotations = matches!(object.key.kind, Kind::Pod | Kind::Namespace);
        let problem = support::unsupported_annotation(object.key.kind, &object.value);
        if let Some(error) = problem.filter(|_| has_annotations) {
            output::error_line(&format!("warning: {}", at(object, error)));
        }
    }
    for object in objects.iter().filter(|object| object.key.kind == Kind::IpPool) {
        if store.get(&object.key).await?.is_some_and(|stored| support::is_terminating(&stored.value)) {
            output::error_line(&format!(
                "warning: {}: it was deleted, gives no addresses, and goes when none of its addresses is in use, whatever was changed",
                object.key
            ));
        }
    }
    warn_of_nodes_without_sessions(store, objects).await;
    if let Some(job) = objects.iter().find(|object| object.key.kind == Kind::CronJob) {
        output::error_line(&format!(
            "note: {}: outside of a Kubernetes API, nothing runs it by its schedule",
            job.key
        ));
    }
    let with_pods =
        objects.iter().filter(|object| object.key.kind == Kind::Pod || object.key.kind.is_workload());
    let namespaces: BTreeSet<&str> = with_pods.map(|object| &*object.key.namespace).collect();
    for namespace in namespaces {
        if store.get(&Key::global(Kind::Namespace, namespace)).await?.is_none() {
            output::error_line(&format!(
                "warning: Namespace {namespace} does not exist: its pods are connected when it is created"
            ));
        }
    }
    Ok(())
}

/// Warns about a mesh that is switched off while no BGPPeer takes its place.
async fn warn_of_nodes_without_sessions(store: &dyn Store, objects: &[Object]) {
    let ends_mesh = |object: &&Object| {
        object.key == Key::global(Kind::BgpConfiguration, "default")
            && object.value["spec"]["nodeToNodeMeshEnabled"] == false
    };
    let Some(object) = objects.iter().find(ends_mesh) else { return };
    let is_given = objects.iter().any(|object| object.key.kind == Kind::BgpPeer);
    // Who may not list them gets no warning that may be wrong.
    let is_alone = list(store, Kind::BgpPeer).await.is_ok_and(|peers| peers.is_empty());
    if !is_given && is_alone {
        output::error_line(&format!(
            "warning: {}: nodeToNodeMeshEnabled is false, and there is no BGPPeer, so no node has a BGP session: pods of pools without \
             encapsulation reach other nodes only by routes that somebody else has",
            object.key
        ));
    }
}

/// Rejects the deletion of pools with addresses in use. Those that another pool has, too, belong to the one that stays.
pub(crate) async fn refuse_deletion(store: &dyn Store, keys: &[Key]) -> anyhow::Result<()> {
    let pools: Vec<&Key> = keys.iter().filter(|key| key.kind == Kind::IpPool).collect();
    if pools.is_empty() {
        return Ok(());
    }
    let stored = list(store, Kind::IpPool).await?;
    let others = networks_of_others(&stored, &pools);
    let blocks = blocks_outside(list(store, Kind::IpamBlock).await?, &others);
    for stored in stored.iter().filter(|stored| pools.contains(&&stored.key)) {
        let read = Pool::of(&stored.key, &stored.value);
        let used = read.and_then(|pool| in_use(&pool.cidr, blocks.iter().map(|block| &block.value)));
        if let Some(used) = used {
            bail!("{}; nothing was deleted", still_in_use(&stored.key, &used));
        }
    }
    Ok(())
}

/// Why a pool cannot be deleted.
pub(crate) fn still_in_use(pool: &Key, used: &InUse) -> String {
    format!(
        "{pool} has addresses in use ({used}): `tortie pool migrate {} NEW` moves what has them to another pool, and deletes this one then",
        pool.name
    )
}

/// A problem of a field, with its line.
pub(crate) fn at(object: &Object, error: FieldError) -> Problem {
    let line = object.lines.of(&error.path);
    let origin = tortie_api::manifest::Origin { line, ..object.origin.clone() };
    Problem { origin, object: object.key.to_string(), field: error.path, problem: error.problem }
}

/// The conflicts of the given pools with stored ones, with nodes, and with addresses in use.
async fn pool_problems<'a>(
    store: &dyn Store,
    objects: &'a [Object],
    how: Writing,
) -> anyhow::Result<Vec<(&'a Object, FieldError)>> {
    let given: Vec<(&Object, Pool)> = objects
        .iter()
        .filter(|object| object.key.kind == Kind::IpPool)
        .filter_map(|object| Some((object, Pool::of(&object.key, &object.value)?)))
        .collect();
    if given.is_empty() {
        return Ok(Vec::new());
    }
    let stored = list(store, Kind::IpPool).await?;
    let blocks = list(store, Kind::IpamBlock).await?;
    let nodes = list(store, Kind::Node).await?;
    let is_given = |key: &Key| given.iter().any(|(object, _)| object.key == *key);
    let others = stored.iter().filter(|other| !is_given(&other.key));
    let mut pools: Vec<Pool> = others.filter_map(|other| Pool::of(&other.key, &other.value)).collect();
    pools.extend(given.iter().map(|(_, pool)| pool.clone()));
    let windows = windows_nodes(&nodes);
    let networks: Vec<(&str, IpNet)> = nodes
        .iter()
        .flat_map(|node| support::node_networks(&node.value).into_iter().map(|net| (&*node.key.name, net)))
        .collect();
    let problems = given.into_iter().flat_map(|(object, pool)| {
        let before = stored.iter().find(|other| other.key == object.key);
        let after = how.result(object, before);
        let changed = before.and_then(|before| refused_change(before, &after, &blocks));
        let old = before.and_then(|before| Pool::of(&before.key, &before.value));
        let is_disabled = |value: &Value| value["spec"]["disabled"] == true;
        let is_enabled = before.is_some_and(|before| is_disabled(&before.value)) && !is_disabled(&after);
        let conflict = conflict(&pool, (old.as_ref(), is_enabled), &pools, &networks);
        let had_ipip = old.is_some_and(|old| old.has_ipip);
        let ipip = support::ipip_beside_windows(&pool, windows.iter().map(|node| &*node.name))
            .filter(|_| !had_ipip)
            .map(|problem| FieldError::new("spec.ipipMode", problem));
        let plain = plain_beside_overlays(&object.key, before, &after, &windows);
        let errors = changed.into_iter().chain(conflict).chain(ipip).chain(plain);
        errors.map(move |error| (object, error)).collect::<Vec<_>>()
    });
    Ok(problems.collect())
}

/// The conflict of a pool with others, or with nodes. A pool that is there with this cidr may still be disabled, for instance:
/// that can be the remedy. One that was disabled, and is to be enabled, is compared as a new one.
fn conflict(
    pool: &Pool,
    (before, is_enabled): (Option<&Pool>, bool),
    pools: &[Pool],
    nodes: &[(&str, IpNet)],
) -> Option<FieldError> {
    let same = before.filter(|before| before.cidr == pool.cidr && !is_enabled);
    let of_pools = support::conflicts(pool, pools).filter(|_| same.is_none());
    // Only addresses of Services may be in the nodes' networks, so a change of the uses may be a new conflict.
    let was_so = same.is_some_and(|before| !before.is_for_load_balancers);
    let of_nodes = || support::overlapping_nodes(pool, nodes.iter().copied()).filter(|_| !was_so);
    of_pools.or_else(of_nodes).map(|problem| match is_enabled {
        true => FieldError::new(
            "spec.disabled",
            format!("the pool must stay disabled: {problem}; create one with another cidr"),
        ),
        false => FieldError::new("spec.cidr", format!("{problem}; choose another cidr")),
    })
}

/// What keeps a pool without encapsulation from Windows nodes with overlays, if IPAM gives its addresses to any pod and the pool
/// was not like that before.
fn plain_beside_overlays(
    key: &Key,
    before: Option<&Stored>,
    after: &Value,
    windows: &[WindowsNode],
) -> Option<FieldError> {
    let problem = |value: &Value| {
        let Ok(Resource::IpPool(pool)) = Resource::read(key, value) else { return None };
        let is_manual = pool.spec.assignment_mode.as_deref().is_some_and(|mode| mode != "Automatic");
        support::plain_beside_overlays(&pool, windows).filter(|_| !pool.spec.disabled && !is_manual)
    };
    problem(after).filter(|_| before.and_then(|before| problem(&before.value)).is_none())
}

/// Whether a Windows node has a block in this network, from which its HNS network is made.
fn has_windows_block(cidr: &IpNet, blocks: &[Stored]) -> bool {
    let read = blocks.iter().filter_map(|stored| Block::deserialize(&stored.value).ok());
    read.filter(|block| cidr.contains(&block.cidr)).any(|block| block.is_of_windows())
}

/// The change of a pool that is not possible: its blocks stay as they are, so Calico's clients and the definition of the kind refuse
/// to change its addresses, too (`libcalico-go/lib/clientv3/ippool.go`); and pods keep addresses that the pool no longer is for.
fn refused_change(before: &Stored, after: &Value, blocks: &[Stored]) -> Option<FieldError> {
    let cidr = Pool::of(&before.key, &before.value)?.cidr;
    let used = in_use(&cidr, blocks.iter().map(|block| &block.value));
    let Ok(Resource::IpPool(old)) = Resource::read(&before.key, &before.value) else { return None };
    let Ok(Resource::IpPool(new)) = Resource::read(&before.key, after) else { return None };
    let uses = |pool: &IpPool| pool.spec.allowed_uses.iter().cloned().collect::<BTreeSet<String>>();
    let differs = [
        ("cidr", old.spec.cidr != new.spec.cidr),
        ("blockSize", old.block_size() != new.block_size()),
        ("allowedUses", used.is_some() && uses(&old) != uses(&new)),
    ];
    let (field, _) = differs.into_iter().find(|(_, differs)| *differs)?;
    let migrate = format!("`tortie pool migrate {} NEW`", before.key.name);
    let problem = match used {
        Some(used) => format!(
            "it cannot change while addresses of the pool are in use ({used}); {migrate} moves what has them to another pool, which has the \
             new settings"
        ),
        None if has_windows_block(&cidr, blocks) => format!(
            "it cannot change, and Windows nodes keep their blocks of the pool, also if it is deleted; {migrate} says how they get blocks of \
             another pool, which has the new settings"
        ),
        None => format!(
            "it cannot change; {migrate} replaces the pool by one with the new settings. As none of its addresses is in use, you can also \
             delete it, which removes its blocks, and create it again when it is gone"
        ),
    };
    Some(FieldError::new(format!("spec.{field}"), problem))
}
