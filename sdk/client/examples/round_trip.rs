//! How long a guest takes from its start to its end as this client sees it: `round_trip SOCKET COMPONENT [ARGUMENT...]` runs it once for
//! each line of standard input, and writes the microseconds that took. The tests of the Python client measure beside it.

use std::error::Error;
use std::io::{self, BufRead as _, Write as _};
use std::time::Instant;

use trellis_client::{Client, Program, StartOptions};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(socket), Some(component)) = (words.next(), words.next()) else {
        return Err("round_trip SOCKET COMPONENT [ARGUMENT...]".into());
    };
    let program = Program::wasm(std::fs::read(component)?);
    let options = StartOptions { arguments: words.collect(), ..StartOptions::default() };
    let client = Client::connect_to(socket).await?;
    for line in io::stdin().lock().lines() {
        line?;
        let begun = Instant::now();
        client.start(program.clone(), options.clone()).await?.wait().await?;
        writeln!(io::stdout(), "{}", begun.elapsed().as_micros())?;
        io::stdout().flush()?;
    }
    Ok(())
}
