//! The resources that verdicts follow from: manifests in files, or a datastore.

use std::path::PathBuf;

use anyhow::{Context, bail};
use tortie_api::Kind;
use tortie_policy::oracle::{Peer, Snapshot};

use crate::manifests;
use crate::store::StoreArguments;

/// Where the resources come from.
#[derive(clap::Args)]
pub(crate) struct Source {
    /// Manifests instead of a datastore: files, folders of them, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    store: StoreArguments,
}

impl Source {
    /// Reads them. `None` if anything is wrong with the manifests: every problem has then been printed.
    pub(crate) fn read(&self) -> anyhow::Result<Option<Snapshot>> {
        let mut snapshot = Snapshot::new();
        if !self.files.is_empty() {
            let Some(objects) = manifests::read_all(&self.files)? else { return Ok(None) };
            for object in objects {
                snapshot.insert(object.key, object.value, Some((object.origin, object.lines)));
            }
            return Ok(Some(snapshot));
        }
        crate::runtime()?.block_on(async {
            let store = self.store.open()?;
            for kind in Kind::all().filter(|kind| matters(*kind)) {
                for stored in store.list(kind).await?.items {
                    snapshot.insert(stored.key, stored.value, None);
                }
            }
            Ok(Some(snapshot))
        })
    }
}

/// Whether verdicts may depend on objects of this kind.
fn matters(kind: Kind) -> bool {
    let bookkeeping =
        [Kind::IpamBlock, Kind::BlockAffinity, Kind::IpamHandle, Kind::IpamConfig, Kind::NodeReport];
    !bookkeeping.contains(&kind)
}

/// Reads one end of a flow: `namespace/pod`, `pod` (of namespace `default`), `node/NAME`, an address, or
/// `networkset/NAMESPACE/NAME` and `globalnetworkset/NAME`, which stand for the first address of their first network.
pub(crate) fn peer(snapshot: &Snapshot, text: &str) -> anyhow::Result<Peer> {
    if let Ok(address) = text.parse() {
        return Ok(Peer::Address(address));
    }
    let parts: Vec<&str> = text.split('/').collect();
    match parts.as_slice() {
        ["node", name] => Ok(Peer::Node((*name).to_owned())),
        ["networkset", namespace, name] => of_set(snapshot, Kind::NetworkSet, namespace, name),
        ["globalnetworkset", name] => of_set(snapshot, Kind::GlobalNetworkSet, "", name),
        [name] => Ok(Peer::Pod { namespace: "default".to_owned(), name: (*name).to_owned() }),
        [namespace, name] => Ok(Peer::Pod { namespace: (*namespace).to_owned(), name: (*name).to_owned() }),
        _ => bail!(
            "{text:?} is none of NAMESPACE/POD, node/NAME, an address, networkset/NAMESPACE/NAME, globalnetworkset/NAME"
        ),
    }
}

fn of_set(snapshot: &Snapshot, kind: Kind, namespace: &str, name: &str) -> anyhow::Result<Peer> {
    let key = tortie_api::Key { kind, namespace: namespace.to_owned(), name: name.to_owned() };
    let stored = snapshot.get(&key).with_context(|| format!("{key} does not exist"))?;
    let net = match &stored.resource {
        Ok(tortie_api::Resource::NetworkSet(set) | tortie_api::Resource::GlobalNetworkSet(set)) => {
            set.spec.nets.first()
        }
        _ => None,
    };
    let tortie_api::Network(net) = net.with_context(|| format!("{key} holds no network"))?;
    Ok(Peer::Address(net.addr()))
}
