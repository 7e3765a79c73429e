"""What computers can do: a catalogue of accelerators, and a probe of this machine."""
