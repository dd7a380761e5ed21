//! What operators set: IPAMConfig and IPReservations.

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::calico::IpReservation;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Resource};
use tortie_store::StoreError;

use crate::access::Records;
use crate::error::IpamError;
use crate::records::Config;

/// The settings of the cluster.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    pub(crate) config: Config,
    /// The addresses that IPAM does not give.
    pub(crate) reserved: Vec<IpNet>,
}

impl Config {
    /// The time from which on released addresses rest; `None` if they do not.
    pub(crate) fn resting_since(&self, now: Timestamp) -> Option<String> {
        let text = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        (self.ip_cooldown_seconds > 0).then_some(text)
    }

    /// Frees the addresses of the block whose rest is over.
    pub fn end_cooldowns(&self, block: &mut Block, now: Timestamp) {
        let seconds = self.ip_cooldown_seconds;
        block.end_cooldowns(|released_at| {
            // A time that nobody can read does not block an address for ever.
            let Ok(released_at) = released_at.parse::<Timestamp>() else { return true };
            seconds < 0 || now.as_second().saturating_sub(released_at.as_second()) > seconds
        });
    }
}

impl Records {
    /// The settings. Without stored ones, these are Calico's defaults.
    pub(crate) async fn settings(&self) -> Result<Settings, IpamError> {
        let config = self.config().await?;
        let reservations = match self.store.list(Kind::IpReservation).await {
            Ok(listing) => listing.items,
            Err(StoreError::KindAbsent(_)) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let mut reserved = Vec::new();
        for stored in reservations {
            match Resource::read(&stored.key, &stored.value) {
                Ok(Resource::IpReservation(IpReservation { spec, .. })) => {
                    reserved.extend(spec.reserved_cidrs.into_iter().map(|net| net.0.trunc()));
                }
                // Its addresses may be in use elsewhere, so none may be given.
                other => {
                    let problem = format!("it cannot be read ({other:?}); correct or delete it");
                    return Err(IpamError::Damaged { key: stored.key, problem });
                }
            }
        }
        Ok(Settings { config, reserved })
    }

    /// The IPAM settings of the cluster.
    ///
    /// # Errors
    /// The store failed, or the settings cannot be read.
    pub async fn config(&self) -> Result<Config, IpamError> {
        let key = Key::global(Kind::IpamConfig, "default");
        Ok(self.read(&key).await?.map(|(_, config)| config).unwrap_or_default())
    }
}
