//! What the node needs around it: a datastore with mutual TLS, and HNS.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_hcn::{Call, Guid, Hcn, Version};
use tortie_hns_emulator::{Config, Emulator, LibraryService};
use tortie_servers::wine::windows_path;
use tortie_servers::{Authority, KubeApi, free_port};
use tortie_store::rpc::{Limits, TlsFiles, TlsIdentity, node_subject, serve_tls};
use tortie_store::{Embedded, Source, Store};

/// The node.
pub(crate) const NODE: &str = "win-1";
/// Its address.
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// A datastore, and the files by which the node's agent reaches it.
pub(crate) struct Cluster {
    pub(crate) store: Arc<Embedded>,
    pub(crate) address: SocketAddr,
    pub(crate) files: TlsFiles,
}

impl Cluster {
    /// A datastore with the node, a pool and a policy. Its certificates are in the folder.
    pub(crate) async fn new(folder: &Path) -> Result<Self> {
        let store = Arc::new(Embedded::in_memory()?);
        fill(&*store).await?;
        let authority = Authority::new(folder)?;
        let server = authority.server_named("tortie-store")?;
        let (organisation, name) = node_subject(NODE);
        let client = authority.client(&name, &[organisation])?;
        let files =
            TlsFiles { authority: authority.certificate(), certificate: client.certificate, key: client.key };
        let identity: TlsIdentity =
            TlsFiles { certificate: server.certificate, key: server.key, ..files.clone() }.read()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let served: Arc<dyn Source> = store.clone();
        // It ends with the runtime. Without it, the agent does not start.
        tokio::spawn(serve_tls(served, address, identity.into(), Limits::default()));
        Ok(Self { store, address, files })
    }

    /// Stores an object, whether or not it exists.
    pub(crate) async fn put(&self, key: &Key, value: Value) -> Result<()> {
        match self.store.get(key).await? {
            Some(stored) => self.store.update(key, value, &stored.version).await?,
            None => self.store.create(key, value).await?,
        };
        Ok(())
    }

    /// Stores a pod of the node.
    pub(crate) async fn pod(&self, name: &str) -> Result<()> {
        let pod = json!({
            "metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"app": "web"}},
            "spec": {"nodeName": NODE, "containers": [{"name": "c"}]},
        });
        self.put(&Key::namespaced(Kind::Pod, "n", name), pod).await
    }

    /// Lets the pods be reached from a network at TCP port 80, and only that.
    pub(crate) async fn allow(&self, net: &str) -> Result<()> {
        let rule = json!({"action": "Allow", "protocol": "TCP", "source": {"nets": [net]}, "destination": {"ports": [80]}});
        let policy = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkPolicy", "metadata": {"name": "web"},
            "spec": {"selector": "app == 'web'", "types": ["Ingress"], "ingress": [rule]},
        });
        self.put(&Key::global(Kind::GlobalNetworkPolicy, "web"), policy).await
    }

    /// The number of addresses that pods have.
    pub(crate) async fn allocated(&self) -> Result<usize> {
        let handles = self.store.list(Kind::IpamHandle).await?.items;
        Ok(handles.iter().filter(|handle| handle.key.name.starts_with("net.")).count())
    }
}

async fn fill(store: &dyn Store) -> Result<()> {
    let annotations = json!({"projectcalico.org/IPv4Address": format!("{ADDRESS}/24")});
    for (key, value) in [
        (
            Key::global(Kind::IpPool, "default"),
            json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/24", "blockSize": 26, "vxlanMode": "Always"}}),
        ),
        (
            Key::global(Kind::IpamConfig, "default"),
            json!({"strict_affinity": true, "auto_allocate_blocks": true}),
        ),
        (Key::global(Kind::Namespace, "n"), json!({"metadata": {"name": "n"}})),
        (Key::global(Kind::Node, NODE), json!({"metadata": {"name": NODE, "annotations": annotations}})),
    ] {
        store.create(&key, value).await?;
    }
    Ok(())
}

/// The administrator's kubeconfig file of an API server, with names of Windows, in this folder.
pub(crate) fn windows_kubeconfig(kube: &KubeApi, folder: &Path) -> Result<PathBuf> {
    let authority = kube.authority().certificate();
    let text = std::fs::read_to_string(kube.kubeconfig())?;
    let text = text.replace(&authority.display().to_string(), &windows_path(&authority));
    let path = folder.join("kubeconfig");
    std::fs::write(&path, text)?;
    Ok(path)
}

/// An HNS of this version on the node.
pub(crate) fn hns(version: Version) -> Config {
    Config::new(version, ADDRESS)
}

/// An emulated HNS that serves libraries on loopback.
pub(crate) struct Hns {
    pub(crate) emulator: Arc<Emulator>,
    pub(crate) service: Arc<LibraryService>,
    pub(crate) address: SocketAddr,
}

impl Hns {
    pub(crate) fn start(config: Config) -> Result<Self> {
        Self::serve(Emulator::new(config))
    }

    pub(crate) fn serve(emulator: Emulator) -> Result<Self> {
        let emulator = Arc::new(emulator);
        let service = Arc::new(LibraryService::new(emulator.clone()));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a port for HNS")?;
        let address = listener.local_addr()?;
        let served: Arc<dyn Hcn> = service.clone();
        tortie_hcn::spawn_tcp(listener, served)?;
        Ok(Self { emulator, service, address })
    }

    /// Connects the node to an L2Bridge network, as flannel does: by an endpoint that is the gateway of the pods.
    pub(crate) fn connect_node(&self, network: Guid, name: &str, gateway: &str) -> Result<()> {
        let document = json!({"Name": name, "IPAddress": gateway, "VirtualNetwork": network});
        let made = self.by_old_interface("POST", "/endpoints/", &document)?;
        let path = format!("/endpoints/{}/attach", made["ID"].as_str().unwrap_or_default());
        let own_compartment = json!({"SystemType": "Host", "CompartmentId": 1});
        self.by_old_interface("POST", &path, &own_compartment).map(drop)
    }

    /// Calls the old interface of HNS, and returns its output.
    pub(crate) fn by_old_interface(&self, method: &str, path: &str, request: &Value) -> Result<Value> {
        let settings = json!({"Method": method, "Path": path, "Request": request.to_string()}).to_string();
        let answer = self.service.call(&Call::Emulator { name: "hns-call".to_owned(), settings })?;
        let mut answer: Value = serde_json::from_str(&answer)?;
        ensure!(answer["Success"] == true, "{method} {path}: {answer}");
        Ok(answer["Output"].take())
    }
}
