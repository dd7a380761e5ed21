//! `tortie node cleanup --flannel`: removes what flannel has left on this node.

use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use anyhow::Context;
use ipnet::IpNet;
use tortie_linux::flannel::FlannelLeftovers;

use super::configurations;

/// Where flanneld writes its networks, in `/run`.
const SUBNETS: &str = "flannel/subnet.env";
/// The variables with flannel's networks there.
const NETWORKS: [&str; 2] = ["FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"];

/// Removes it, or only says what it is. Every step can be repeated.
pub(super) fn remove(
    cni_conf_dir: &Path,
    run_dir: &Path,
    networks: &[IpNet],
    dry_run: bool,
) -> anyhow::Result<ExitCode> {
    let networks = if networks.is_empty() { written(&run_dir.join(SUBNETS))? } else { networks.to_vec() };
    if networks.is_empty() {
        anstream::println!(
            "note: {} names no network of flannel, so its bridge and its routes to other nodes are not recognised; name it by \
             --flannel-network",
            run_dir.join(SUBNETS).display()
        );
    }
    let found = FlannelLeftovers::find(&networks).context("looking for what flannel has left")?;
    let files = configurations::of_plugin(cni_conf_dir, "flannel", &[])?;
    for note in found.notes() {
        anstream::println!("note: {note}");
    }
    if found.is_empty() && files.is_empty() {
        anstream::println!("flannel has left nothing on this node");
        return Ok(ExitCode::SUCCESS);
    }
    let listed = files.iter().map(|file| format!("file {}\n", file.display())).collect::<String>();
    let checked = found.check().map_err(anyhow::Error::from);
    let checked = checked.and_then(|()| configurations::check_own(cni_conf_dir, "flannel"));
    if dry_run {
        anstream::print!("would remove:\n{found}{listed}");
        if let Err(problem) = checked {
            anstream::println!("but {problem:#}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    checked?;
    anstream::print!("removing:\n{found}{listed}");
    found.remove().context("removing what flannel has left")?;
    configurations::remove(&files)?;
    Ok(ExitCode::SUCCESS)
}

/// The networks in a file of flanneld's, which may list several of a family, separated by commas.
fn written(file: &Path) -> anyhow::Result<Vec<IpNet>> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| file.display().to_string())?,
    };
    let values = text.lines().filter_map(|line| line.split_once('='));
    let values = values.filter(|(name, _)| NETWORKS.contains(&name.trim()));
    let nets = values.flat_map(|(_, value)| value.split(',')).map(str::trim).filter(|net| !net.is_empty());
    nets.map(|net| net.parse().with_context(|| format!("{}: {net:?} is no network", file.display())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_networks_are_those_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("subnet.env");
        assert_eq!(written(&file).unwrap(), Vec::<IpNet>::new());
        for (text, expected) in [
            ("FLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\n", Some("")),
            ("FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\n", Some("10.244.0.0/16")),
            (
                "FLANNEL_NETWORK=10.244.0.0/16,10.245.0.0/16\nFLANNEL_IPV6_NETWORK=fd00::/48\n",
                Some("10.244.0.0/16 10.245.0.0/16 fd00::/48"),
            ),
            ("FLANNEL_NETWORK=x\n", None),
        ] {
            fs::write(&file, text).unwrap();
            let nets = written(&file).ok();
            let nets = nets.map(|nets| nets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
            assert_eq!(nets.as_deref(), expected, "{text}");
        }
    }
}
