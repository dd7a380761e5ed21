//! What flannel asks of Windows PowerShell, which Wine lacks: routes, and forwarding of interfaces. A stand-in
//! (`crates/hns-dll/src/bin/powershell.rs`) sends the commands here, where they are recorded, and change the node's network namespace.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use serde_json::json;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Change, Route, RouteSocket};
use tortie_kernel::sysctl;

use super::frames::path_of;

/// The variable that tells the stand-in where this is.
pub(super) const ADDRESS: &str = "TORTIE_POWERSHELL_ADDRESS";
const CMDLETS: [&str; 4] = ["Get-NetRoute", "New-NetRoute", "Remove-NetRoute", "Set-NetIPInterface"];
/// The protocol of the routes: an administrator's.
const PROTOCOL: u8 = 4;

/// The PowerShell of a node.
pub(super) struct PowerShell {
    /// Where the stand-in reaches it.
    pub(super) address: SocketAddr,
    commands: Arc<Mutex<Vec<String>>>,
}

impl PowerShell {
    /// Serves on the node's loopback until this process ends.
    pub(super) fn start(node: &NetNs) -> Result<Self> {
        let listener = node.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))??;
        let address = listener.local_addr()?;
        let commands = Arc::new(Mutex::new(Vec::new()));
        let (node, recorded) = (NetNs::open(&path_of(node))?, Arc::clone(&commands));
        std::thread::spawn(move || {
            for stand_in in listener.incoming().map_while(io::Result::ok) {
                // A stand-in that gets no answer fails, and flannel says so.
                let _ = serve(stand_in, &node, &recorded);
            }
        });
        Ok(Self { address, commands })
    }

    /// The commands so far, without the regular look at all routes.
    pub(super) fn commands(&self) -> Vec<String> {
        let commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.iter().filter(|command| *command != "Get-NetRoute").cloned().collect()
    }
}

fn serve(mut stand_in: TcpStream, node: &NetNs, recorded: &Mutex<Vec<String>>) -> Result<()> {
    let mut text = String::new();
    stand_in.read_to_string(&mut text)?;
    let command = command(&text).with_context(|| format!("no known command: {text}"));
    let answer = command.and_then(|command| {
        recorded.lock().unwrap_or_else(PoisonError::into_inner).push(command.clone());
        node.run(|| execute(&command))?
    });
    let answer = answer.map_or_else(|error| format!("1 {error:#}"), |output| format!("0 {output}"));
    stand_in.write_all(answer.as_bytes())?;
    Ok(stand_in.shutdown(Shutdown::Both)?)
}

/// The command with its parameters, without what is around it: `try { … | Select-Object … } catch { … }`.
fn command(text: &str) -> Option<String> {
    let start = CMDLETS.iter().filter_map(|name| text.find(name)).min()?;
    let end = text[start..].find(['|', '}', ')']).map_or(text.len(), |length| start + length);
    Some(text[start..end].split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Carries a command out in the network namespace of this thread, and returns its output.
fn execute(command: &str) -> Result<String> {
    let words: Vec<&str> = command.split(' ').collect();
    let parameter = |name: &str| {
        let at = words
            .iter()
            .position(|word| word.strip_prefix('-').is_some_and(|it| it.eq_ignore_ascii_case(name)));
        at.and_then(|at| words.get(at + 1)).copied()
    };
    let link = parameter("InterfaceIndex").or_else(|| parameter("ifIndex"));
    let link: Option<u32> = link.map(str::parse).transpose()?;
    let destination: Option<IpNet> = parameter("DestinationPrefix").map(str::parse).transpose()?;
    let mut links = RouteSocket::open()?;
    match (words[0], link, destination) {
        ("Get-NetRoute", link, destination) => {
            let matches = |route: &Route| {
                link.is_none_or(|link| route.link == Some(link))
                    && destination.is_none_or(|destination| route.destination == destination)
            };
            let routes: Vec<_> =
                links.routes()?.into_iter().filter(matches).filter_map(|it| shown(&it)).collect();
            if routes.is_empty() {
                bail!("No MSFT_NetRoute objects found");
            }
            Ok(json!(routes).to_string())
        }
        (verb @ ("New-NetRoute" | "Remove-NetRoute"), Some(link), Some(destination)) => {
            let hop: IpAddr = parameter("NextHop").context("there is no NextHop")?.parse()?;
            let route = Route::via(destination, hop, link, PROTOCOL);
            let change =
                if verb == "New-NetRoute" { Change::AddRoute(route) } else { Change::DeleteRoute(route) };
            links.change(&change)?;
            Ok(String::new())
        }
        ("Set-NetIPInterface", Some(link), None) => {
            let value = match parameter("Forwarding") {
                Some("Enabled") => "1",
                Some("Disabled") => "0",
                other => bail!("Forwarding {other:?}"),
            };
            let found = links.links()?.into_iter().find(|it| it.index == link);
            let name = found.with_context(|| format!("there is no interface {link}"))?.name;
            sysctl::ensure(&format!("net/ipv4/conf/{name}/forwarding"), value)?;
            Ok(String::new())
        }
        _ => bail!("parameters are missing: {command}"),
    }
}

/// An IPv4 route as `ConvertTo-Json` shows it.
fn shown(route: &Route) -> Option<serde_json::Value> {
    let IpNet::V4(destination) = route.destination else { return None };
    let hop = route.gateway.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
    Some(json!({"ifIndex": route.link?, "DestinationPrefix": destination, "NextHop": hop}))
}

#[cfg(test)]
mod tests {
    use super::command;

    #[test]
    fn commands_are_found_in_what_is_around_them() {
        let wrapped = |text: &str| {
            format!("$ErrorActionPreference=\"Stop\";try {{ {text} }} catch {{ Write-Host $_; os.Exit(-1) }}")
        };
        let set = "Set-NetIPInterface -ifIndex 4 -AddressFamily IPv4 -Forwarding Enabled";
        let get = "Get-NetRoute -InterfaceIndex 4 -DestinationPrefix 10.244.1.0/24";
        let json = wrapped(&format!("ConvertTo-Json (@({get} | Select-Object -Property IfIndex,NextHop))"));
        assert_eq!(command(&wrapped(set)).as_deref(), Some(set));
        assert_eq!(command(&wrapped(&json)).as_deref(), Some(get));
        assert_eq!(
            command(&wrapped("ConvertTo-Json (@(Get-NetRoute | Select-Object))")).as_deref(),
            Some("Get-NetRoute")
        );
        let new = "New-NetRoute -InterfaceIndex 4 -DestinationPrefix 10.244.1.0/24 -NextHop  172.16.0.1";
        assert_eq!(command(&wrapped(new)).as_deref(), Some(new.replace("  ", " ").as_str()));
        assert_eq!(command(&wrapped("Get-Service hns")), None);
    }
}
