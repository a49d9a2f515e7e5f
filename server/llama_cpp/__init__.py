"""llama.cpp's API for editors: `POST /infill`."""
