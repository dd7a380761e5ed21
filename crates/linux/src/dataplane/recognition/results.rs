//! The results of CNI plugins that container runtimes keep: one file for each interface of each sandbox
//! (`libcni/api.go` of containernetworking/cni, kind `cniCacheV1`).

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use serde_json::Value;
use tortie_dataplane::EndpointId;

/// An interface that a plugin has made for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attachment {
    pub(super) namespace: String,
    pub(super) pod: String,
    /// Its name in the pod.
    pub(super) interface: String,
    pub(super) addresses: BTreeSet<IpAddr>,
    /// The interfaces that the plugin has on the host for it.
    pub(super) host_interfaces: Vec<String>,
}

impl Attachment {
    pub(super) fn is_of(&self, id: &EndpointId) -> bool {
        *self.namespace == *id.namespace && *self.pod == *id.pod && *self.interface == *id.interface
    }

    /// Reads a file. `None` if it is not complete (yet), or not about a pod.
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let file: Value = serde_json::from_slice(text).ok()?;
        let arguments = file["cniArgs"].as_array()?;
        let argument = |name: &str| {
            let pair = arguments.iter().find(|pair| pair[0] == name)?;
            pair[1].as_str().filter(|value| !value.is_empty()).map(str::to_owned)
        };
        let interface = file["ifName"].as_str()?.to_owned();
        let result = &file["result"];
        let on_host = result["interfaces"].as_array().into_iter().flatten();
        let on_host = on_host.filter(|it| it["sandbox"].as_str().unwrap_or_default().is_empty());
        // Some plugins list the pod's own interface without its sandbox.
        let names = on_host.filter_map(|it| it["name"].as_str()).filter(|name| *name != interface);
        let ips = result["ips"].as_array().into_iter().flatten();
        Some(Self {
            namespace: argument("K8S_POD_NAMESPACE")?,
            pod: argument("K8S_POD_NAME")?,
            addresses: ips.filter_map(|ip| address(ip["address"].as_str()?)).collect(),
            host_interfaces: names.map(str::to_owned).collect(),
            interface,
        })
    }
}

fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpNet>().map(|net| net.addr()).or_else(|_| text.parse()).ok()
}

/// Reads the files of a folder. A folder that does not exist (yet) has none.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn read(folder: &Path) -> io::Result<Vec<Attachment>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut all = Vec::new();
    for entry in entries {
        // A file may be deleted meanwhile.
        let text = std::fs::read(entry?.path()).unwrap_or_default();
        all.extend(Attachment::parse(&text));
    }
    Ok(all)
}
