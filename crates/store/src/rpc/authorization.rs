//! Who may do what: one table of roles, kinds and verbs.
//!
//! The table limits keys, the value that is written, and the scope that is read. It does not look at the stored object.
//! So these things remain possible to a node, because Tortie's IPAM needs them on every node:
//!
//! - it may change or delete every IPAM block and handle, because any node may release an address of another node's
//!   block;
//! - it may change everything in its own Node, also its labels.

use std::fmt;

use serde_json::Value;
use tortie_api::{Key, Kind};

use super::client_identity::Role;
use crate::{Interest, Scope, StoreError, Write};

/// What a client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Delete,
}

/// Which objects of a kind a role may read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    No,
    /// Those of the client's own node.
    Own,
    All,
}

use Extent::{All, No, Own};

/// What a role may do with a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rights {
    read: Extent,
    create: Extent,
    update: Extent,
    delete: Extent,
}

const fn rights(read: Extent, create: Extent, update: Extent, delete: Extent) -> Rights {
    Rights { read, create, update, delete }
}

const NOTHING: Rights = rights(No, No, No, No);
const READ: Rights = rights(All, No, No, No);
const FULL: Rights = rights(All, All, All, All);

/// The rights of a node and of the controllers. An operator has all rights.
fn row(kind: Kind) -> (Rights, Rights) {
    match kind {
        // What the cluster's API has, which the controllers copy.
        Kind::Namespace
        | Kind::ServiceAccount
        | Kind::Pod
        | Kind::Service
        | Kind::EndpointSlice
        | Kind::ServiceCidr
        | Kind::KubernetesNetworkPolicy
        | Kind::ClusterNetworkPolicy
        | Kind::AdminNetworkPolicy
        | Kind::BaselineAdminNetworkPolicy
        | Kind::Profile => (READ, FULL),
        Kind::Node => (rights(All, No, Own, No), FULL),
        // What operators write.
        Kind::Tier
        | Kind::NetworkSet
        | Kind::GlobalNetworkSet
        | Kind::NetworkPolicy
        | Kind::GlobalNetworkPolicy
        | Kind::FelixConfiguration
        | Kind::ClusterInformation
        | Kind::BgpPeer
        | Kind::BgpConfiguration
        | Kind::BgpFilter
        | Kind::IpPool
        | Kind::IpReservation
        | Kind::IpamConfig => (READ, READ),
        Kind::KubeControllersConfiguration | Kind::CalicoNodeStatus => (NOTHING, READ),
        Kind::Lease => (NOTHING, FULL),
        // Only a lab makes pods of them.
        Kind::Deployment
        | Kind::ReplicaSet
        | Kind::StatefulSet
        | Kind::DaemonSet
        | Kind::ReplicationController
        | Kind::Job
        | Kind::CronJob => (NOTHING, NOTHING),
        Kind::StagedNetworkPolicy | Kind::StagedGlobalNetworkPolicy | Kind::StagedKubernetesNetworkPolicy => {
            (NOTHING, READ)
        }
        Kind::HostEndpoint => (READ, FULL),
        // What nodes write.
        Kind::WorkloadEndpoint | Kind::BlockAffinity => (rights(All, Own, Own, Own), FULL),
        Kind::IpamBlock => (rights(All, Own, All, All), FULL),
        Kind::IpamHandle => (FULL, FULL),
        Kind::NodeReport => (rights(Own, Own, Own, No), rights(All, No, No, All)),
    }
}

/// Why a client may do nothing.
const NO_ROLE: &str =
    "it names no role; issue one with the organisation tortie:nodes, tortie:components or tortie:operators";

impl Role {
    /// Why a client with this role may do nothing, whatever it asks for; nothing if it may do something.
    pub(crate) fn refusal(&self) -> Option<String> {
        match self {
            Self::None(_) => Some(format!("{self} may do nothing: {NO_ROLE}")),
            Self::Node(_) | Self::Controllers | Self::Operator(_) => None,
        }
    }

    /// Up to how many percent the client may fill the store. So nodes leave room for the controllers, and these for operators, who mend
    /// it.
    pub(crate) fn share(&self) -> u64 {
        match self {
            Self::Node(_) | Self::None(_) => 80,
            Self::Controllers => 90,
            Self::Operator(_) => 100,
        }
    }

    /// # Errors
    /// The client may not read this object.
    pub(crate) fn may_get(&self, key: &Key) -> Result<(), StoreError> {
        let is_own = || self.node().is_some_and(|node| is_named_for(key, node));
        self.check(Verb::Get, key.kind, is_own, || key.to_string())
    }

    /// # Errors
    /// The client may not list these objects.
    pub(crate) fn may_list(&self, interest: &Interest) -> Result<(), StoreError> {
        self.may_read(Verb::List, interest)
    }

    /// # Errors
    /// The client may not watch these objects.
    pub(crate) fn may_watch(&self, interest: &Interest) -> Result<(), StoreError> {
        self.may_read(Verb::Watch, interest)
    }

    /// # Errors
    /// The client may not watch any object of the kind, so its positions do not concern it.
    pub(crate) fn may_wait_for(&self, kind: Kind) -> Result<(), StoreError> {
        self.check(Verb::Watch, kind, || true, || kind.to_string())
    }

    /// # Errors
    /// The client may not read everything at once.
    pub(crate) fn may_back_up(&self) -> Result<(), StoreError> {
        match self {
            Self::Operator(_) => Ok(()),
            Self::Node(_) | Self::Controllers | Self::None(_) => Err(StoreError::Forbidden(format!(
                "{self} may not back up the store; use the certificate of an operator"
            ))),
        }
    }

    /// # Errors
    /// The client may not write this.
    pub(crate) fn may_write(&self, write: &Write) -> Result<(), StoreError> {
        let (verb, value) = match write {
            Write::Create(_, value) => (Verb::Create, Some(value)),
            Write::Update(_, value, _) => (Verb::Update, Some(value)),
            Write::Delete(..) => (Verb::Delete, None),
        };
        let key = write.key();
        let is_own = || {
            self.node().is_some_and(|node| {
                is_named_for(key, node) && value.is_none_or(|value| is_written_for(key.kind, value, node))
            })
        };
        self.check(verb, key.kind, is_own, || key.to_string())
    }

    fn may_read(&self, verb: Verb, interest: &Interest) -> Result<(), StoreError> {
        let is_own = || {
            self.node().is_some_and(|node| match &interest.scope {
                Scope::Node(of) => of == node,
                Scope::Name(namespace, name) => {
                    is_named_for(&Key::namespaced(interest.kind, namespace, name), node)
                }
                Scope::All | Scope::Namespace(_) => false,
            })
        };
        self.check(verb, interest.kind, is_own, || scope(interest))
    }

    fn node(&self) -> Option<&str> {
        match self {
            Self::Node(name) => Some(name),
            Self::Controllers | Self::Operator(_) | Self::None(_) => None,
        }
    }

    fn rights(&self, kind: Kind) -> Rights {
        match self {
            Self::Node(_) => row(kind).0,
            Self::Controllers => row(kind).1,
            Self::Operator(_) => FULL,
            Self::None(_) => NOTHING,
        }
    }

    fn check(
        &self,
        verb: Verb,
        kind: Kind,
        is_own: impl FnOnce() -> bool,
        object: impl FnOnce() -> String,
    ) -> Result<(), StoreError> {
        let rights = self.rights(kind);
        let extent = match verb {
            Verb::Get | Verb::List | Verb::Watch => rights.read,
            Verb::Create => rights.create,
            Verb::Update => rights.update,
            Verb::Delete => rights.delete,
        };
        let why = match (self, extent) {
            (_, All) => return Ok(()),
            (_, Own) if is_own() => return Ok(()),
            (Self::None(_), _) => NO_ROLE.to_owned(),
            (_, Own) => format!("a node may do this only to its own {}", kind.plural()),
            (_, No) => format!(
                "this role has no such right on {}; use the certificate of an operator",
                kind.plural()
            ),
        };
        Err(StoreError::Forbidden(format!("{self} may not {verb} {}: {why}", object())))
    }
}

/// Whether the name of the object belongs to the node. Names of kinds without nodes belong to everybody.
fn is_named_for(key: &Key, node: &str) -> bool {
    match key.kind {
        Kind::Node | Kind::NodeReport => key.name == node,
        // `<node>/<CIDR>`.
        Kind::BlockAffinity => key.name.split_once('/').is_some_and(|(of, _)| of == node),
        // `WorkloadEndpoint::name_for`: a dash inside the node's name is doubled, and a single one ends it.
        Kind::WorkloadEndpoint => {
            let rest = key.name.strip_prefix(&node.replace('-', "--"));
            rest.and_then(|rest| rest.strip_prefix('-')).is_some_and(|rest| !rest.starts_with('-'))
        }
        _ => true,
    }
}

/// Whether the value that is written names the node as its own, where values name a node.
fn is_written_for(kind: Kind, value: &Value, node: &str) -> bool {
    match kind {
        Kind::WorkloadEndpoint => value["spec"]["node"] == node,
        Kind::IpamBlock => {
            let affinity = value["affinity"].as_str();
            affinity.and_then(|affinity| affinity.strip_prefix("host:")) == Some(node)
        }
        _ => true,
    }
}

fn scope(interest: &Interest) -> String {
    let plural = interest.kind.plural();
    match &interest.scope {
        Scope::All => format!("all {plural}"),
        Scope::Node(node) => format!("the {plural} of node {node}"),
        Scope::Namespace(namespace) => format!("the {plural} of namespace {namespace}"),
        Scope::Name(namespace, name) => Key::namespaced(interest.kind, namespace, name).to_string(),
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::Get => "get",
            Verb::List => "list",
            Verb::Watch => "watch",
            Verb::Create => "create",
            Verb::Update => "update",
            Verb::Delete => "delete",
        })
    }
}
