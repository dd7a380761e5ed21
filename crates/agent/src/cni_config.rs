//! The configuration by which the container runtime calls the plugin. It is written when the agent serves ADD, because
//! kubelets report a node as ready as soon as it exists. It is written again when the families of the pods' addresses change.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ipnet::Ipv4Net;
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tortie_api::net::IpVersion;
use tortie_cni::{AddressSource, NetworkConfig};
use tortie_dataplane::{Condition, Reason, WiringError};
use tortie_deploy::{CNI_CONFIG_FILE, CNI_NETWORK, ChainedPlugins, cni_config};
use tortie_store::backoff::{Backoff, random_seed};

/// How often the agent looks whether the node has IPv6 and whether the file is there: no event tells it.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);

/// The file for the container runtime.
#[derive(Debug, Clone)]
pub(crate) struct ConfigFile {
    /// The runtime's folder.
    pub(crate) folder: PathBuf,
    /// The plugins after Tortie's.
    pub(crate) chained: ChainedPlugins,
    /// What the runtime passes to Tortie's plugin.
    pub(crate) capabilities: Vec<&'static str>,
}

/// What decides about the section `ipam`.
pub(crate) enum IpamSource {
    /// It stays as it is.
    Fixed(CniIpam),
    /// The addresses are of flannel's networks of these families, and of IPv6 only if pods can have it.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "pods of Windows nodes have IPv4 only"))]
    Flannel(watch::Receiver<Vec<IpVersion>>, HasIpv6),
}

/// Whether the node's pods can have IPv6 addresses now.
pub(crate) type HasIpv6 = Box<dyn Fn() -> Result<bool, WiringError> + Send + Sync>;

impl IpamSource {
    /// The section now. If the system does not tell whether there is IPv6, that stays as it was.
    fn now(&mut self, had_ipv6: &mut bool) -> CniIpam {
        match self {
            Self::Fixed(ipam) => ipam.clone(),
            Self::Flannel(families, has_ipv6) => {
                let families = families.borrow_and_update().clone();
                if families.contains(&IpVersion::V6) {
                    *had_ipv6 = has_ipv6().unwrap_or_else(|error| {
                        tracing::warn!(%error, had_ipv6, "the CNI configuration keeps the address families of the pods");
                        *had_ipv6
                    });
                }
                CniIpam::host_local_of(&families, *had_ipv6)
            }
        }
    }

    /// Waits until the section or the file may be another one.
    async fn changed(&mut self) {
        let changed = async {
            let has_changed = match self {
                Self::Fixed(_) => false,
                Self::Flannel(families, _) => families.changed().await.is_ok(),
            };
            // If there is no sender, or it is gone, only the interval remains.
            if !has_changed {
                std::future::pending().await
            }
        };
        let _ = tokio::time::timeout(LOOK_INTERVAL, changed).await;
    }
}

/// Writes the configuration, and again when it is to be another one, or when somebody has changed or removed the file. Calls
/// `written` after the first success. A failure is a condition. Ends only when the future is dropped.
pub(crate) async fn keep(
    file: ConfigFile,
    mut source: IpamSource,
    conditions: watch::Sender<Option<Condition>>,
    written: impl FnOnce(),
) {
    let (path, mut backoff) = (file.folder.join(CNI_CONFIG_FILE), Backoff::new(random_seed()));
    let (mut known, mut had_ipv6, mut written) = (None::<CniIpam>, false, Some(written));
    loop {
        let ipam = source.now(&mut had_ipv6);
        let (to, section) = (file.clone(), ipam.clone());
        // A slow disk must not block the other tasks.
        let writing = tokio::task::spawn_blocking(move || write(&to, &section));
        if let Err(error) = writing.await.unwrap_or_else(|panic| Err(io::Error::other(panic))) {
            fail(&conditions, &path, &error);
            backoff.wait().await;
            continue;
        }
        backoff.succeeded();
        if conditions.send_if_modified(|condition| condition.take().is_some()) {
            tracing::info!(file = %path.display(), "the CNI configuration is written now");
        }
        match known.replace(ipam.clone()) {
            Some(former) if former != ipam => {
                tracing::info!(file = %path.display(), %former, %ipam, "the address families of the node's pods have changed; Tortie has rewritten the CNI configuration");
            }
            Some(_) => {}
            None => warn_of_preceding(&file.folder),
        }
        written.take().into_iter().for_each(|written| written());
        source.changed().await;
    }
}

/// Reports that the file cannot be written, and why. The log has each reason once.
fn fail(conditions: &watch::Sender<Option<Condition>>, path: &Path, error: &io::Error) {
    let meanwhile = match path.exists() {
        true => "the container runtime uses the former one for new pods",
        false => "the container runtime starts no pods with Tortie",
    };
    let message = format!(
        "{} cannot be written, so {meanwhile}: {error}; make room there, or make the folder writable. Tortie retries",
        path.display()
    );
    conditions.send_if_modified(|known| {
        if known.as_ref().is_some_and(|known| known.message == message) {
            return false;
        }
        tracing::error!("the CNI configuration {message}");
        *known = Some(Condition::new(Reason::CniConfigNotWritten, message));
        true
    });
}

/// Writes the configuration if the file differs. Runtimes see either the old file or the complete new one.
fn write(file: &ConfigFile, ipam: &CniIpam) -> io::Result<()> {
    let ConfigFile { folder, chained, capabilities } = file;
    let mut config = ipam.add_to(cni_config(chained));
    for capability in capabilities {
        config["plugins"][0]["capabilities"][*capability] = json!(true);
    }
    let text = format!("{config:#}\n");
    let path = folder.join(CNI_CONFIG_FILE);
    if fs::read_to_string(&path).is_ok_and(|current| current == text) {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    // Runtimes ignore other endings.
    let unfinished = folder.join(format!(".{CNI_CONFIG_FILE}.unfinished"));
    let mut file = File::create(&unfinished)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&unfinished, &path)?;
    tracing::info!(file = %path.display(), "wrote the CNI configuration");
    Ok(())
}

fn warn_of_preceding(folder: &Path) {
    match preceding(folder) {
        Ok(None) => {}
        Ok(Some(file)) => tracing::warn!(
            file,
            "the container runtime uses another CNI configuration than Tortie's, because its name comes first: pods that it connects have no policy, unless it calls Tortie's plugin; remove the file"
        ),
        Err(error) => {
            tracing::warn!(%error, folder = %folder.display(), "cannot read which CNI configuration comes first");
        }
    }
}

/// The first configuration of the folder, if it is not Tortie's.
fn preceding(folder: &Path) -> io::Result<Option<String>> {
    let mut first: Option<String> = None;
    for entry in fs::read_dir(folder)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let is_configuration = [".conf", ".conflist", ".json"].iter().any(|ending| name.ends_with(ending));
        if is_configuration && first.as_ref().is_none_or(|first| name < *first) {
            first = Some(name);
        }
    }
    Ok(first.filter(|first| first != CNI_CONFIG_FILE))
}

/// The section `ipam` of Tortie's plugin. By default there is none, and Tortie's own IPAM gives the addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CniIpam(Option<Map<String, Value>>);

impl CniIpam {
    /// The addresses of the network in `spec.podCIDRs` of the Node, as flannel's plugin configures it.
    pub(crate) fn host_local() -> Self {
        Self(Some(Map::from_iter([("type".to_owned(), json!("host-local"))])))
    }

    /// The addresses of a network from this one on.
    pub(crate) fn host_local_from(subnet: Ipv4Net, first: Ipv4Addr) -> Self {
        let ranges = json!([[{"subnet": subnet.to_string(), "rangeStart": first.to_string()}]]);
        let section = [("type".to_owned(), json!("host-local")), ("ranges".to_owned(), ranges)];
        Self(Some(Map::from_iter(section)))
    }

    /// The addresses of the Node's networks of these families, one of each. Without IPv6 on the node, pods have IPv4 only.
    pub(crate) fn host_local_of(families: &[IpVersion], has_ipv6: bool) -> Self {
        let has = |version: IpVersion| families.contains(&version);
        let subnets = match (has(IpVersion::V4), has(IpVersion::V6)) {
            (true, true) if has_ipv6 => &["usePodCidr", "usePodCidrIPv6"][..],
            (false, true) => &["usePodCidrIPv6"],
            (true, _) | (false, false) => return Self::host_local(),
        };
        let ranges: Vec<Value> = subnets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
        let section = [("type".to_owned(), json!("host-local")), ("ranges".to_owned(), json!(ranges))];
        Self(Some(Map::from_iter(section)))
    }

    /// Whether another section than that of [`host_local`](Self::host_local) was written.
    pub(crate) fn is_other_than_host_local(&self) -> bool {
        *self != Self::default() && *self != Self::host_local()
    }

    /// Whether a plugin obtains the addresses, and not the agent.
    pub(crate) fn is_delegated(&self) -> bool {
        let Some(section) = &self.0 else { return false };
        let network: Result<NetworkConfig, _> =
            serde_json::from_value(json!({"name": CNI_NETWORK, "ipam": section}));
        network.is_ok_and(|network| network.address_source().is_ok_and(AddressSource::is_delegated))
    }

    /// Adds it to a configuration. Another IPAM plugin may not know the newest version of the protocol.
    fn add_to(&self, mut config: Value) -> Value {
        let Some(section) = &self.0 else { return config };
        config["plugins"][0]["ipam"] = json!(section);
        if let Some(config) = config.as_object_mut().filter(|_| is_of_another(section)) {
            config.remove("cniVersions");
        }
        config
    }
}

impl fmt::Display for CniIpam {
    /// The section as JSON.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", json!(self.0))
    }
}

fn is_of_another(section: &Map<String, Value>) -> bool {
    let network: Result<NetworkConfig, _> = serde_json::from_value(json!({"ipam": section}));
    network.is_ok_and(|network| matches!(network.address_source(), Ok(AddressSource::Plugin(_))))
}

impl FromStr for CniIpam {
    type Err = String;

    /// Reads a JSON object. Empty text is none.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let section: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| format!("{error}; use an object such as {{\"type\": \"host-local\"}}"))?;
        let network = json!({"name": CNI_NETWORK, "ipam": section});
        let network: NetworkConfig = serde_json::from_value(network).map_err(|error| error.to_string())?;
        network.address_source().map_err(|failure| failure.to_string())?;
        Ok(Self(Some(section)))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn file_in(folder: &Path) -> ConfigFile {
        let chained = ChainedPlugins::default();
        ConfigFile { folder: folder.to_owned(), chained, capabilities: Vec::new() }
    }

    fn read(folder: &Path) -> Option<Value> {
        serde_json::from_str(&fs::read_to_string(folder.join(CNI_CONFIG_FILE)).ok()?).ok()
    }

    #[test]
    fn the_file_is_complete_and_written_only_when_it_differs() {
        let folder = tempfile::tempdir().unwrap();
        let (conf_dir, file) =
            (folder.path().join("net.d"), folder.path().join("net.d").join(CNI_CONFIG_FILE));
        let rewrite = || write(&file_in(&conf_dir), &CniIpam::default()).unwrap();
        rewrite();
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(read(&conf_dir).unwrap(), cni_config(&ChainedPlugins::default()));
        let inode = fs::metadata(&file).unwrap().ino();
        rewrite();
        assert_eq!(fs::metadata(&file).unwrap().ino(), inode);
        fs::write(&file, "{").unwrap();
        rewrite();
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        assert_eq!(fs::read_dir(&conf_dir).unwrap().count(), 1);
    }

    #[test]
    fn the_section_ipam_is_part_of_the_file() {
        let written = |text: &str| {
            let folder = tempfile::tempdir().unwrap();
            write(&file_in(folder.path()), &text.parse().unwrap()).unwrap();
            read(folder.path()).unwrap()
        };
        assert_eq!(written(""), cni_config(&ChainedPlugins::default()));
        for (section, has_versions) in
            [(json!({"type": "host-local"}), true), (json!({}), true), (json!({"type": "dhcp"}), false)]
        {
            let config = written(&section.to_string());
            assert_eq!(config["plugins"][0]["ipam"], section);
            assert_eq!(config["cniVersions"].is_array(), has_versions, "{section}");
        }
        for (wrong, expected) in
            [("[]", "use an object"), (r#"{"type": "a/b"}"#, "file name"), ("x", "use an object")]
        {
            assert!(wrong.parse::<CniIpam>().unwrap_err().contains(expected), "{wrong}");
        }
    }

    #[test]
    fn what_the_runtime_passes_is_part_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = ConfigFile { capabilities: vec!["dns"], ..file_in(folder.path()) };
        write(&file, &CniIpam::default()).unwrap();
        assert_eq!(read(folder.path()).unwrap()["plugins"][0]["capabilities"], json!({"dns": true}));
    }

    #[test]
    fn another_configuration_that_comes_first_is_named() {
        let folder = tempfile::tempdir().unwrap();
        write(&file_in(folder.path()), &CniIpam::default()).unwrap();
        for (name, expected) in [
            ("10-calico.conflist", None),
            ("00-multus.conf.disabled", None),
            ("00-multus.conf", Some("00-multus.conf")),
            ("00-a.json", Some("00-a.json")),
        ] {
            fs::write(folder.path().join(name), "{}").unwrap();
            assert_eq!(preceding(folder.path()).unwrap().as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn pods_have_addresses_of_flannels_families_and_of_ipv6_only_where_they_can() {
        let [v4, v6] = [IpVersion::V4, IpVersion::V6];
        let of_v6 = json!({"type": "host-local", "ranges": [[{"subnet": "usePodCidrIPv6"}]]});
        let both = json!({"type": "host-local", "ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "usePodCidrIPv6"}]]});
        let of_v4 = json!({"type": "host-local"});
        for (families, has_ipv6, expected) in [
            (&[v4][..], true, &of_v4),
            (&[v4, v6], true, &both),
            (&[v4, v6], false, &of_v4),
            // An ADD says why it fails.
            (&[v6], false, &of_v6),
        ] {
            let ipam = CniIpam::host_local_of(families, has_ipv6);
            assert_eq!(ipam.to_string(), expected.to_string(), "{families:?} {has_ipv6}");
        }
    }

    /// Time passes at once, but not that of the disk.
    async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        for _ in 0..3_000 {
            if is_so() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!("not in time: {what}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_running_agent_writes_the_families_of_now() {
        let folder = tempfile::tempdir().unwrap();
        let (v4, v6) = (IpVersion::V4, IpVersion::V6);
        let [has_ipv6, served] = [true, false].map(|value| Arc::new(AtomicBool::new(value)));
        let (families, known) = watch::channel(vec![v4]);
        let (conditions, condition) = watch::channel(None);
        let (asked, serves) = (has_ipv6.clone(), served.clone());
        let source = IpamSource::Flannel(known, Box::new(move || Ok(asked.load(Ordering::Relaxed))));
        let (file, written) = (file_in(folder.path()), move || serves.store(true, Ordering::Relaxed));
        let unfinished = folder.path().join(format!(".{CNI_CONFIG_FILE}.unfinished"));
        let sets = || {
            let ipam = read(folder.path())?["plugins"][0]["ipam"].take();
            Some(ipam["ranges"].as_array().map_or(1, Vec::len))
        };
        // Even root cannot write there.
        fs::create_dir(&unfinished).unwrap();
        let keeping = tokio::spawn(keep(file, source, conditions, written));
        until("a condition", || condition.borrow().is_some()).await;
        let message = condition.borrow().as_ref().unwrap().message.clone();
        assert!(message.contains("starts no pods") && message.contains(CNI_CONFIG_FILE), "{message}");
        assert!(!served.load(Ordering::Relaxed) && sets().is_none());
        fs::remove_dir(&unfinished).unwrap();
        until("the file", || sets() == Some(1)).await;
        until("the end of the condition", || condition.borrow().is_none()).await;
        assert!(served.load(Ordering::Relaxed));

        families.send_replace(vec![v4, v6]);
        until("both families", || sets() == Some(2)).await;
        has_ipv6.store(false, Ordering::Relaxed);
        until("IPv4 only, because IPv6 is off", || sets() == Some(1)).await;
        fs::create_dir(&unfinished).unwrap();
        has_ipv6.store(true, Ordering::Relaxed);
        until("a condition", || condition.borrow().is_some()).await;
        let message = condition.borrow().as_ref().unwrap().message.clone();
        assert!(message.contains("uses the former one") && sets() == Some(1), "{message}");
        fs::remove_dir(&unfinished).unwrap();
        until("both families again", || sets() == Some(2)).await;
        until("the end of the condition", || condition.borrow().is_none()).await;
        // What cannot be written is not wanted any more.
        fs::create_dir(&unfinished).unwrap();
        families.send_replace(vec![v4]);
        until("a condition", || condition.borrow().is_some()).await;
        families.send_replace(vec![v4, v6]);
        until("the end of the condition", || condition.borrow().is_none()).await;
        assert_eq!(sets(), Some(2));
        fs::remove_dir(&unfinished).unwrap();
        families.send_replace(vec![v4]);
        until("IPv4 only", || sets() == Some(1)).await;
        fs::remove_file(folder.path().join(CNI_CONFIG_FILE)).unwrap();
        until("the file again", || sets() == Some(1)).await;
        keeping.abort();
    }
}
