"""Other people's trainers in a group. Each module needs the library that it is named after."""
