//! The shell: sockets and clocks around [`Router`](crate::router::Router). One task owns sessions and tables; each
//! connection has a task that reads and one that writes.

mod config;
mod connection;
mod error;
mod owner;
mod socket;
mod status;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use tokio::sync::{mpsc, oneshot};

pub use config::{Config, Password, PeerConfig, Transport};
pub use error::Error;
pub use status::{PeerStatus, RouteEvent, SpeakerStatus};

use self::owner::{Command, Owner};
use crate::rib::{Chosen, OwnRoute, Why};

/// The most commands that wait.
const COMMANDS: usize = 64;

/// A speaker, its reports, and what it leaves out.
pub type Started = (Speaker, mpsc::UnboundedReceiver<RouteEvent>, Vec<Error>);

/// A running speaker. It ends without a word when this is dropped, and its peers keep its routes for the restart time;
/// [`shut_down`](Self::shut_down) takes leave of them.
#[derive(Debug)]
pub struct Speaker {
    commands: mpsc::Sender<Command>,
}

impl Speaker {
    /// Starts a speaker, in the network namespace of the calling thread's runtime. `restarted` says that an earlier
    /// speaker's routes are still in the kernel, and how long to wait at most for the peers' routes before these are
    /// replaced. The receiver reports the chosen routes.
    ///
    /// The list says what is left out, as for [`apply`](Self::apply).
    ///
    /// # Errors
    /// It cannot listen.
    pub async fn start(config: Config, restarted: Option<Duration>) -> Result<Started, Error> {
        Self::begin(config, restarted, |_| {}).await
    }

    /// As [`start`](Self::start), for a reader who knows the ways to next hops. Routes are used, and peers are told about them, only
    /// when the reader has [said](Self::set_costs) that there is a way. [`RouteEvent::UnknownNextHops`] asks for it.
    ///
    /// # Errors
    /// It cannot listen.
    pub async fn start_asking(config: Config, restarted: Option<Duration>) -> Result<Started, Error> {
        Self::begin(config, restarted, Owner::require_known_next_hops).await
    }

    async fn begin(
        config: Config,
        restarted: Option<Duration>,
        prepare: impl FnOnce(&mut Owner),
    ) -> Result<Started, Error> {
        let (commands, received) = mpsc::channel(COMMANDS);
        let (events, routes) = mpsc::unbounded_channel();
        // Speakers that start at once must not try at once for ever.
        let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
            ^ u64::from(u32::from(config.identifier)) << 32;
        let mut owner = Owner::new(config.identifier, seed, restarted, received, events);
        prepare(&mut owner);
        tokio::spawn(owner.run());
        let speaker = Self { commands };
        match speaker.apply(config).await {
            Ok(left_out) => Ok((speaker, routes, left_out)),
            Err(error) => {
                // The next attempt needs the addresses where this one listens.
                let _ = speaker.shut_down("").await;
                Err(error)
            }
        }
    }

    /// Changes the configuration. Sessions whose settings stay the same go on. Addresses that the system does not have, and
    /// peers that cannot be protected as configured, are left out and returned; apply the configuration again to retry.
    ///
    /// # Errors
    /// It cannot listen at any address, somebody else does, or the identifier would change. The rest is in force.
    pub async fn apply(&self, config: Config) -> Result<Vec<Error>, Error> {
        self.ask(|answer| Command::Apply(Box::new(config), answer)).await?
    }

    /// Adds or changes own routes.
    ///
    /// # Errors
    /// The speaker has ended.
    pub async fn advertise(&self, routes: impl IntoIterator<Item = (IpNet, OwnRoute)>) -> Result<(), Error> {
        let routes = routes.into_iter().map(|(prefix, route)| (prefix, Some(route))).collect();
        self.tell(Command::SetOwn(routes)).await
    }

    /// Removes own routes.
    ///
    /// # Errors
    /// The speaker has ended.
    pub async fn withdraw(&self, prefixes: impl IntoIterator<Item = IpNet>) -> Result<(), Error> {
        let routes = prefixes.into_iter().map(|prefix| (prefix, None)).collect();
        self.tell(Command::SetOwn(routes)).await
    }

    /// Sets the costs of the ways to next hops; `None` if there is no way.
    ///
    /// # Errors
    /// The speaker has ended.
    pub async fn set_costs(&self, costs: Vec<(IpAddr, Option<u32>)>) -> Result<(), Error> {
        self.tell(Command::SetCosts(costs)).await
    }

    /// Forgets the costs of next hops that no route of a peer has any more, and returns these next hops.
    ///
    /// # Errors
    /// The speaker has ended.
    pub async fn forget_unused_costs(&self) -> Result<Vec<IpAddr>, Error> {
        self.ask(Command::ForgetUnusedCosts).await
    }

    /// Asks a peer to send its routes again.
    ///
    /// # Errors
    /// The speaker has ended.
    pub async fn refresh(&self, peer: SocketAddr) -> Result<(), Error> {
        self.tell(Command::Refresh(peer)).await
    }

    /// The state of the speaker.
    ///
    /// # Errors
    /// The speaker has ended.
    pub async fn status(&self) -> Result<SpeakerStatus, Error> {
        self.ask(Command::Status).await
    }

    /// All chosen routes.
    ///
    /// # Errors
    /// The speaker has ended.
    pub async fn routes(&self) -> Result<Vec<(IpNet, Vec<Chosen>)>, Error> {
        self.ask(Command::Routes).await
    }

    /// What is known about the longest prefix with a route that contains this one, and that prefix.
    ///
    /// # Errors
    /// The speaker has ended.
    pub async fn why(&self, of: IpNet) -> Result<Option<(IpNet, Why)>, Error> {
        self.ask(|answer| Command::Why(of, answer)).await
    }

    /// Ends all sessions, and tells the peers why. They drop the routes. It returns when the last messages are sent, or after
    /// five seconds.
    ///
    /// # Errors
    /// The speaker has ended before.
    pub async fn shut_down(self, text: &str) -> Result<(), Error> {
        self.ask(|answer| Command::ShutDown(text.to_owned(), answer)).await
    }

    async fn tell(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).await.map_err(|_| Error::Ended)
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Error> {
        let (answer, received) = oneshot::channel();
        self.tell(command(answer)).await?;
        received.await.map_err(|_| Error::Ended)
    }
}
